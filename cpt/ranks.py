"""Which of the run's processes this one is, and how all of them agree."""

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import cpt.errors
from cpt.errors import CptError
from cpt.hf_internals import exit_now, run_exit_functions

Result = TypeVar("Result")
CONTINUE = "CPT_CONTINUE"  # set for a run that began with `--new`, so that all its processes name the same command


def rank() -> int:
    """Number of this process among all of the run, as the launcher set it."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Number of this process among those of its node."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0")


def num_nodes() -> int:
    """How many machines the run has, as torchrun (also inside accelerate), DeepSpeed's launcher or srun set it."""
    if world_size() == 1:
        return 1
    of_srun = os.environ.get("SLURM_NNODES") if os.environ.get("SLURM_PROCID") == str(rank()) else None
    return int(os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("CROSS_SIZE") or of_srun or "1")


def name_of_launcher() -> str:
    """accelerate, torchrun, deepspeed, or python where nothing but Python started it.

    Read from what each launcher leaves in the environment; accelerate uses torchrun inside.
    """
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        return "accelerate"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return "deepspeed" if "CROSS_SIZE" in os.environ else "python"


def is_main_process() -> bool:
    """True for the one process that writes files and talks to the user."""
    return rank() == 0


def same_command() -> str:
    """What continues this run, at the beginning of a sentence; a run that began with `--new` needs another command."""
    words = os.environ.get(CONTINUE, "The same command")
    return words[0].upper() + words[1:]


def tell(message: str) -> None:
    """Print a sentence for the user, once for all processes."""
    if is_main_process():
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()


def has_process_group() -> bool:
    """True where this process is connected with others; asking does not import torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def leave(code: int) -> NoReturn:
    """End this process now, with what was registered for its end (trackers finish their uploads there).

    With a process group, Python's own shutdown is left out: a thread of gloo that still holds the last tensors needs
    Python's lock to drop them, and then hangs or aborts the process (seen in a third of short runs with torch 2.13 and
    DeepSpeed).
    """
    if not has_process_group():
        sys.exit(code)
    run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
    exit_now(code)


def main_process_first(work: Callable[[], Result]) -> Result:
    """Run `work` on the main process, then, when it succeeded, on all the others.

    A CptError of the main process is raised on every rank, so that no process waits for one that has given up.
    """
    results: list[Result] = []
    main_process_decides(lambda: results.append(work()))
    return results[0] if results else work()


def main_process_decides(work: Callable[[], Result]) -> Result:
    """What `work` returns on the main process, the only one that runs it, on every process.

    A CptError of the main process is raised on every rank.
    """
    if world_size() == 1:
        return work()
    import torch.distributed as dist

    decided: list[Any] = [None, None]
    if is_main_process():
        try:
            decided = [work(), None]
        except CptError as problem:
            decided = [None, (type(problem).__name__, str(problem))]
        except BaseException as problem:
            dist.broadcast_object_list([None, ("CptError", f"the main process failed: {problem!r}")], src=0)
            raise
    dist.broadcast_object_list(decided, src=0)
    result, failure = decided
    if failure is not None:
        kind, message = failure
        raise vars(cpt.errors)[kind](message)
    return result  # type: ignore[no-any-return]
