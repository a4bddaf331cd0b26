"""Whether an error means that this process lost the others, and which words about its end are its own."""

import torch.distributed as dist

from cpt.errors import Interrupted, LaunchError
from cpt.ranks import world_size


def lost_others(problem: BaseException) -> bool:
    """Whether a collective failed: a process that it needed is gone, cannot be reached, or took longer than the group
    waits."""
    if world_size() == 1 or not isinstance(problem, RuntimeError):
        return False
    # gloo raises plain RuntimeErrors, which begin with the place in its own sources.
    return isinstance(problem, dist.DistError) or "gloo/transport" in str(problem)


def own_words(problem: BaseException | None) -> str:
    """The error that ended this process; empty where it ended well, because it was told to, or because of others."""
    if (
        problem is None
        or isinstance(problem, Interrupted | KeyboardInterrupt | SystemExit | LaunchError)
        or lost_others(problem)
    ):
        return ""
    return f"{type(problem).__name__}: {problem}"
