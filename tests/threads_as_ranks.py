"""Ranks as threads of this process, for quick tests of what several processes compute together."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

Result = TypeVar("Result")
ISOLATE = torch._C._distributed_c10d._set_thread_isolation_mode


def on_ranks(world_size: int, work: Callable[[int], Result]) -> list[Result]:
    """Run `work(rank)` on each rank, in a process group of all of them; return the results in order.

    The first error of a rank is raised at once: the others do not wait for it in a collective.
    """
    store = dist.HashStore()
    problems: list[BaseException] = []

    def run(rank: int) -> Result:
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            return work(rank)
        except BaseException as problem:
            problems.append(problem)
            ProcessLocalGroup.exception_handle(problem)
            raise

    ISOLATE(True)
    _install_threaded_pg()
    try:
        with ThreadPoolExecutor(world_size) as ranks:
            futures = [ranks.submit(run, rank) for rank in range(world_size)]
        if problems:
            raise problems[0]
        return [future.result() for future in futures]
    finally:
        _uninstall_threaded_pg()
        ProcessLocalGroup.reset()
        ISOLATE(False)
