"""How trials share one machine: each gets GPUs of its own."""

import os

from cpt.errors import ResourceError
from cpt.hardware import find_gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"


def environments(parallel: int, processes: int) -> list[dict[str, str]]:
    """What stands in the environment of each trial that runs at the same time.

    Args:
        parallel: how many there are.
        processes: of each, a GPU for each of them.

    Raises:
        ResourceError: there are too few GPUs.
    """
    gpus = visible_gpus()
    if parallel == 1 or not gpus:
        return [{}] * parallel
    if len(gpus) < parallel * processes:
        raise ResourceError(
            f"--parallel {parallel} with {processes} process(es) each needs {parallel * processes} GPUs, and there are"
            f" {len(gpus)}."
        )
    share = len(gpus) // parallel
    return [{VISIBLE: ",".join(gpus[slot * share : (slot + 1) * share])} for slot in range(parallel)]


def visible_gpus() -> list[str]:
    """As CUDA names them: those that this process may see."""
    listed = os.environ.get(VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    return [str(number) for number in range(len(find_gpus()))]
