"""The part of a worker, as `--share` says it: `3/16`, or `array` for what SLURM says of the job."""

import os
import re
from collections.abc import Mapping

from cpt.data.store.shares import Share
from cpt.errors import RecipeError

ARRAY = "array"
SLURM = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_COUNT")


def share_of(words: str, environment: Mapping[str, str] = os.environ) -> Share:
    """The share.

    Raises:
        RecipeError: it is none, or there is no SLURM array.
    """
    if words == ARRAY:
        return of_array(environment)
    found = re.fullmatch(r"(\d+)/(\d+)", words)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise RecipeError(
            f"--share is `{words}`, expected the worker's number, from 1 on, and how many there are: 3/16. In a SLURM"
            " array: array."
        )
    return Share(int(found[1]), int(found[2]))


def of_array(environment: Mapping[str, str]) -> Share:
    """The task's place among those of its array; of one that is submitted again by itself, all: it makes whatever is
    left."""
    if missing := [name for name in SLURM if not environment.get(name, "").isdecimal()]:
        raise RecipeError(
            f"--share array is for a job of `sbatch --array=1-16`: {', '.join(missing)} not set. Elsewhere: --share"
            " 3/16."
        )
    number, first, count = (int(environment[name]) for name in SLURM)
    step = int(environment.get("SLURM_ARRAY_TASK_STEP", "1"))
    return Share((number - first) // step % count + 1, count)
