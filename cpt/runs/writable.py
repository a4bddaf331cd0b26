"""Whether a run's folder takes what a run writes, asked before anything is loaded."""

import os
import socket
from pathlib import Path

from cpt.errors import RecipeError

PROBE_BYTES = 1 << 16


def refuse_unwritable(folder: Path) -> None:
    """Do in the folder what saving does there: write, send to the disk, rename, remove.

    Raises:
        RecipeError: one of these cannot be done.
    """
    probe = folder / f".probe-{socket.gethostname()}-{os.getpid()}"
    renamed = folder / f"{probe.name}-renamed"
    try:
        with probe.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        probe.rename(renamed)
        renamed.unlink()
    except OSError as problem:
        raise RecipeError(
            f"`output_dir`: nothing can be saved in {folder}: {problem.strerror}. Mend that, or set output_dir to a"
            " folder you can write."
        ) from problem
    finally:
        if probe.exists():
            probe.unlink()
