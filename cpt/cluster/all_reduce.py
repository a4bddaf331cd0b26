"""One timed all-reduce over all nodes, and what each pair of neighbours exchanges: `python -m cpt.cluster.all_reduce`.

In processes of its own, so that one that hangs inside of gloo or NCCL can be killed. It is told what to do by lines of
JSON on its standard input, and answers on its standard output; when its input ends, so does it.
"""

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SMALL_BYTES = 4 * 2**20
LARGE_BYTES = {"gloo": 64 * 2**20, "nccl": 256 * 2**20}
PAIR_BYTES = {"gloo": 8 * 2**20, "nccl": 64 * 2**20}
FAST_ENOUGH_SECONDS = 0.25
"""A small all-reduce that took longer is the measurement; the large one would not end in time."""
REPEATED = 3


@dataclass(frozen=True)
class Part:
    """What one process does in it."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int
    backend: str
    seconds: float
    speakers: tuple[int, ...]
    """The ranks of the first process of each node, which are paired."""


def main() -> None:
    """Make the store if told to, then take part, then say what was measured."""
    lines = iter(sys.stdin.readline, "")
    first = json.loads(next(lines, "{}"))
    store = None
    if first.get("holds_store"):
        store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=first["seconds"])
        )
        say({"port": store.port})
    told = json.loads(next(lines, "{}"))
    if not told:
        return
    threading.Thread(target=end_with_input, daemon=True).start()
    part = Part(**{**told, "speakers": tuple(told["speakers"])})
    timeout = timedelta(seconds=part.seconds)
    try:
        if store is None:
            store = dist.TCPStore(part.host, part.port, is_master=False, timeout=timeout)
        measured = measure(part, store, timeout)
    except (RuntimeError, dist.DistError) as problem:  # of gloo, NCCL and CUDA alike
        say({"error": str(problem).strip().splitlines()[0]})
        sys.stdout.flush()
        os._exit(1)
    say(measured)
    os._exit(0)  # a group whose other members have gone may not end by itself


def say(value: dict[str, Any]) -> None:
    """One line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def end_with_input() -> None:
    """Whoever asked for this is gone, or wants no more of it."""
    while sys.stdin.readline():
        pass
    os._exit(1)


def measure(part: Part, store: dist.Store, timeout: timedelta) -> dict[str, Any]:
    """Bytes and seconds of an all-reduce, then of each pair that this process is half of."""
    device = torch.device("cpu")
    if part.backend == "nccl":
        torch.cuda.set_device(part.local_rank)
        device = torch.device("cuda", part.local_rank)
    dist.init_process_group(part.backend, store=store, rank=part.rank, world_size=part.world_size, timeout=timeout)
    began = time.monotonic()
    seconds, size = timed(SMALL_BYTES, device), SMALL_BYTES
    first_seconds = time.monotonic() - began
    # All processes have to take the same way: the slowest decides.
    slowest = torch.tensor([seconds], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if slowest.item() < FAST_ENOUGH_SECONDS:
        size = LARGE_BYTES[part.backend]
        seconds = timed(size, device)
    pairs = dict(exchanged(part, device))
    dist.barrier()
    return {
        "bytes": size,
        "seconds": seconds,
        "first_seconds": first_seconds,
        "pairs": pairs,
        "world_size": part.world_size,
    }


def timed(size: int, device: torch.device) -> float:
    """Seconds of one all-reduce of so many bytes, the best of a few, after one that is not counted."""
    tensor = torch.ones(size // 4, device=device)
    best = float("inf")
    for turn in range(1 + REPEATED):
        dist.barrier()
        began = time.monotonic()
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn:
            best = min(best, time.monotonic() - began)
    return best


def exchanged(part: Part, device: torch.device) -> list[tuple[int, float]]:
    """GB/s with the node after and the node before this one."""
    if part.rank not in part.speakers or len(part.speakers) < 3:  # of two nodes the all-reduce tells as much
        return []
    here = part.speakers.index(part.rank)
    mine = [pair for pairs in rounds(len(part.speakers)) for pair in pairs if here in pair]
    return [(b if here == a else a, pair_speed(part, a, b, here, device)) for a, b in mine]


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Each node with the one after it, in rounds in which no node has two partners; of an odd number the last pair is
    alone."""
    pairs = [(node, (node + 1) % count) for node in range(count)]
    alone = [pairs.pop()] if count % 2 else []
    return [found for found in (pairs[::2], pairs[1::2], alone) if found]


def pair_speed(part: Part, first: int, second: int, here: int, device: torch.device) -> float:
    """GB/s there and back again, the best of a few."""
    tensor = torch.ones(PAIR_BYTES[part.backend] // 4, device=device)
    other = part.speakers[second if here == first else first]
    best = float("inf")
    for turn in range(1 + REPEATED):  # the first makes the connection
        began = time.monotonic()
        for sender in (first, second):
            if here == sender:
                dist.send(tensor, other)
            else:
                dist.recv(tensor, other)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn:
            best = min(best, time.monotonic() - began)
    return 2 * tensor.numel() * tensor.element_size() / best / 1e9


if __name__ == "__main__":
    main()
