"""Let torch restore to `cpu:0`, where transformers 5.17 wants the optimizer of a run of several processes on CPUs;
5.18 asks for `cpu`."""

from functools import cache
from typing import Any

import torch

BEFORE_CUDA = 9  # torch asks in the order of these numbers; its own begin with 10


@cache
def know_indexed_cpu() -> None:
    """Once in a process; there is one CPU, whatever its number."""
    torch.serialization.register_package(BEFORE_CUDA, lambda storage: None, on_cpu)


def on_cpu(storage: Any, location: str) -> Any:
    """The storage as it is, where a CPU with a number is meant; otherwise others are asked."""
    return storage if location.startswith("cpu:") else None
