"""Run by test_values.py: two processes take the steps of a plan, and keep what each of them saw.

The plan lists (name, function, stage, rows, options); the function returns the `Taken` of this process.
"""

import os
import sys
import traceback
from multiprocessing import get_context
from pathlib import Path

# What runs import, once, before the processes are forked.
import stages.test_values_of_samples  # noqa: F401
import torch


def take(rank: int, folder: Path) -> None:
    """Take all steps of the plan, as process `rank`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    try:
        for name, function, stage, rows, options in torch.load(
            folder / "plan.pt", weights_only=False
        ):
            taken = function(stage, folder / name, *rows, **options)
            torch.save(taken, folder / f"{name}-{rank}.pt")
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    plan, port = sys.argv[1:]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    fork = get_context("fork")
    processes = [fork.Process(target=take, args=(rank, Path(plan))) for rank in range(2)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        processes[0].join(0.2)
        if any(process.exitcode for process in processes):
            for process in processes:  # the other one would wait for it
                process.kill()
    sys.exit(any(process.exitcode for process in processes))
