"""Compile a small Triton kernel and run it on a device: exit code 0 if it works on this machine."""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def add_up(numbers, total, size: tl.constexpr):
    tl.store(total, tl.sum(tl.load(numbers + tl.arange(0, size)), 0))


if __name__ == "__main__":
    numbers = torch.ones(64, device=sys.argv[1])
    total = torch.zeros_like(numbers[:1])
    add_up[(1,)](numbers, total, 64)
    assert total.item() == 64, f"it computed {total.item()} instead of 64"
