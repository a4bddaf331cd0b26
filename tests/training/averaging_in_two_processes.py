"""Run by test_averaging.py under torchrun: gradients averaged in buckets during the backward pass, compared with those
averaged one by one after it.

Each case is a line of JSON: its name, the weights whose gradients differ in a bit, the buckets, and how many of them
were sent before the backward pass ended.
"""

import copy
import json
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from cpt.training import averaging
from cpt.training.averaging import AverageInBackward


class Tiny(nn.Module):
    """Bfloat16 layers with a tied head, a frozen layer, and an expert for each process that only it uses."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.experts = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.head = nn.Linear(24, 50, bias=False)
        self.layers[1].requires_grad_(False)
        if tied:
            self.head.weight = self.embedding.weight
        self.bfloat16()
        for weight in self.parameters():
            weight.grad_dtype = torch.float32

    def forward(self, ids: torch.Tensor, experts: tuple[int, ...], reentrant: bool) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=True) if reentrant else layer(hidden)
        if reentrant:  # its weights get a second gradient, from another backward pass
            hidden = checkpoint(self.layers[3], hidden, use_reentrant=True)
        for expert in experts:
            hidden = hidden + self.experts[expert](hidden)
        return self.head(hidden).float().logsumexp(-1).mean()


class Counted(AverageInBackward):
    """Also counts the buckets that were sent in the backward pass."""

    def finish(self) -> None:
        self.early = self.num_sent
        super().finish()


def average_one_by_one(model: nn.Module) -> None:
    for weight in model.parameters():
        present = torch.tensor(int(weight.grad is not None))
        dist.all_reduce(present, op=dist.ReduceOp.MAX)
        if present and weight.grad is None:
            weight.grad = torch.zeros_like(weight, dtype=torch.float32)
        if present:
            dist.all_reduce(weight.grad.div_(dist.get_world_size()))


def differing(
    name: str, model: Tiny, used: Callable[[int, int], tuple[int, ...]], *, reentrant: bool = False
) -> None:
    """Two steps of three micro-batches; `used` returns the experts of a process and micro-batch."""
    other, rank = copy.deepcopy(model), dist.get_rank()
    for weight in other.parameters():
        weight.grad_dtype = torch.float32
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    average = Counted(trained, may_lack=True)
    differ = set()
    for step in range(2):
        for number in range(3):
            ids = torch.randint(
                50, (2, 8), generator=torch.Generator().manual_seed(100 * step + 10 * number + rank)
            )
            other(ids, used(rank, number), reentrant).backward()
            if number < 2:
                model(ids, used(rank, number), reentrant).backward()
                continue
            with average.during_backward():
                model(ids, used(rank, number), reentrant).backward()
        average_one_by_one(other)
        for (key, weight), reference in zip(
            model.named_parameters(), other.parameters(), strict=True
        ):
            if (weight.grad is None) != (reference.grad is None):
                differ.add(key)
            elif weight.grad is not None and not torch.equal(weight.grad, reference.grad):
                error = (weight.grad - reference.grad).norm() / reference.grad.norm()
                differ.add(f"{key} {'rounding' if error < 1e-6 else error}")
        model.zero_grad()
        other.zero_grad()
    case = {
        "case": name,
        "differ": sorted(differ),
        "buckets": len(average.buckets),
        "early": average.early,
    }
    os.write(
        1, (json.dumps(case) + "\n").encode()
    )  # in one piece: the two processes share the pipe


def all_used(rank: int, number: int) -> tuple[int, ...]:
    return 0, 1, 2


def own(rank: int, number: int) -> tuple[int, ...]:
    return (rank,)


def only_in_the_first(rank: int, number: int) -> tuple[int, ...]:
    if number == 0:
        return 0, 1, 2
    return 0, 2


def only_in_one_last(rank: int, number: int) -> tuple[int, ...]:
    if rank == 1 and number == 2:
        return 0, 1
    return (0,)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    averaging.BUCKET_BYTES = 4 * 1400
    differing("dense", Tiny(), all_used)
    differing("tied", Tiny(tied=True), all_used)
    differing("an expert for each process", Tiny(), own)
    differing("an expert of earlier micro-batches", Tiny(), only_in_the_first)
    differing("an expert of the last micro-batch of one process", Tiny(), only_in_one_last)
    averaging.BUCKET_BYTES = 0
    differing("a bucket for each weight", Tiny(tied=True), all_used)
    differing("a second gradient", Tiny(), all_used, reentrant=True)
    differing("a second gradient of one process", Tiny(), only_in_one_last, reentrant=True)


if __name__ == "__main__":
    main()
