"""How a run stands: what its status says, and whether the process that should be running still is."""

import os
import socket
from pathlib import Path

from cpt.recipe.run_results import STATUS
from cpt.runs.read_back import Content, read_object
from cpt.runs.record import LOCK

DIED = "died"


def read_status(folder: Path) -> Content:
    """The status; a `running` whose process is gone from this host has the state `died`."""
    status = read_object(folder / STATUS, [])
    if status.get("state") == "running" and is_gone(folder, status.get("pid")):
        return {**status, "state": DIED}
    return status


def is_gone(folder: Path, pid: object) -> bool:
    """Whether the run's process ended without a word. Of another host's nothing is known, so it counts as there."""
    try:
        told = (folder / LOCK).read_text(errors="replace").split()
    except OSError:
        told = []
    if len(told) == 4 and told[1].isdecimal():  # process PID on HOST
        pid, host = int(told[1]), told[3]
    else:
        host = socket.gethostname()
    return host == socket.gethostname() and isinstance(pid, int) and not is_alive(pid)


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return pid > 0
