"""Whether the disk has room for a checkpoint."""

import shutil
from pathlib import Path

MIB = 2**20
RESERVE = 16 * MIB  # for what else the run writes, and for the file system's own tables


def refuse_small_disk(folder: Path, needed: int) -> None:
    """See that the folder's disk has room.

    Raises:
        OSError: it has not.
    """
    free = shutil.disk_usage(folder).free
    if free < needed + RESERVE:
        room = f"{needed / MIB:,.0f} MiB and {RESERVE / MIB:.0f} MiB for what else the run writes"
        raise OSError(f"the checkpoint takes {room}, and {folder} has {free / MIB:,.0f} MiB free")
