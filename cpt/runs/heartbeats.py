"""Heartbeats: what each process of a run last reported, for whoever watches the run from outside; needs no torch."""

import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from cpt.files import write_atomic
from cpt.runs.folder import HEARTBEATS

Phase = Literal["starting", "training", "between", "ending"]


@dataclass(frozen=True)
class Sign:
    """The last heartbeat of one process."""

    rank: int
    pid: int
    host: str
    phase: Phase
    """Starting: before the first step. Between: before an evaluation or a save. Ending: after the last step."""
    step: int
    beats: int
    """Goes up with progress, so that a watcher needs no clock of this machine."""
    seconds_per_step: float | None
    """Median of the last 20 steps; None before three of them."""
    gpu_peak_gib: float | None = None
    """Peak memory that torch used on its GPU; None without one."""
    pulse: int = 0
    """Goes up while the process exists, even if it waits for others."""
    ended: str | None = None
    """The error that ended it; empty if it ended because of others, None while it runs."""


def write_sign(folder: Path, sign: Sign) -> None:
    """Atomic; a full disk must neither end a run nor make it look dead."""
    path = folder / HEARTBEATS / f"rank-{sign.rank}.json"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(asdict(sign)), reuse_space=True)


def read_signs(folder: Path) -> list[Sign]:
    """The last heartbeats of all processes, by rank."""
    signs = []
    for path in sorted((folder / HEARTBEATS).glob("rank-*.json")):
        try:
            signs.append(Sign(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):  # another version's, or gone meanwhile
            continue
    return sorted(signs, key=lambda sign: sign.rank)


def is_of_this_host(sign: Sign) -> bool:
    return sign.host == socket.gethostname()


def pids_here(folder: Path) -> list[int]:
    """Numbers of the run's processes on this host."""
    return [sign.pid for sign in read_signs(folder) if is_of_this_host(sign)]


def name_processes(some: Sequence[Sign], everyone: Sequence[Sign]) -> str:
    """`host-1 (process 4, 5)` if they are all processes of a host, else `process 4, 5 on host-1`."""
    names = []
    for host in sorted({sign.host for sign in some}):
        ranks = [sign.rank for sign in some if sign.host == host]
        listed = f"process {', '.join(map(str, ranks))}"
        is_whole = len(ranks) == sum(sign.host == host for sign in everyone)
        names.append(f"{host} ({listed})" if is_whole else f"{listed} on {host}")
    return " and ".join(names)


def forget_signs(folder: Path) -> None:
    for path in (folder / HEARTBEATS).glob("*rank-*"):  # with what a killed process was writing
        path.unlink(missing_ok=True)
