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
class LastHeartbeat:
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


def write_heartbeat(folder: Path, beat: LastHeartbeat) -> None:
    """Atomic; a full disk must neither end a run nor make it look dead."""
    path = folder / HEARTBEATS / f"rank-{beat.rank}.json"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(asdict(beat)), reuse_space=True)


def read_heartbeats(folder: Path) -> list[LastHeartbeat]:
    heartbeats = []
    for path in sorted((folder / HEARTBEATS).glob("rank-*.json")):
        try:
            heartbeats.append(LastHeartbeat(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):  # another version's, or gone meanwhile
            continue
    return sorted(heartbeats, key=lambda beat: beat.rank)


def is_of_this_host(beat: LastHeartbeat) -> bool:
    return beat.host == socket.gethostname()


def pids_here(folder: Path) -> list[int]:
    return [beat.pid for beat in read_heartbeats(folder) if is_of_this_host(beat)]


def name_processes(some: Sequence[LastHeartbeat], everyone: Sequence[LastHeartbeat]) -> str:
    """`host-1 (process 4, 5)` if they are all processes of a host, else `process 4, 5 on host-1`."""
    names = []
    for host in sorted({beat.host for beat in some}):
        ranks = [beat.rank for beat in some if beat.host == host]
        listed = f"process {', '.join(map(str, ranks))}"
        is_whole = len(ranks) == sum(beat.host == host for beat in everyone)
        names.append(f"{host} ({listed})" if is_whole else f"{listed} on {host}")
    return " and ".join(names)


def remove_heartbeats(folder: Path) -> None:
    for path in (folder / HEARTBEATS).glob("*rank-*"):  # with what a killed process was writing
        path.unlink(missing_ok=True)
