"""The events of a run in events.jsonl (skipped batches, roll-backs, restarts, damage, full disks), and the heartbeats
of its processes, to monitor the run from outside."""

import json
import logging
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from cpt.distributed import rank
from cpt.files import LinesFile, write_atomic
from cpt.runs.folder import EVENTS, HEARTBEATS, read_objects

log = logging.getLogger("cpt")
OPENED: dict[Path, LinesFile] = {}
"""Run's folder -> its file: lines that a full disk rejected must outlive the call."""


def record_event(
    folder: Path, kind: str, message: str, *, step: int | None = None, **details: Any
) -> None:
    """Append one line to the run's events.jsonl, and log the message; several processes may call it concurrently.

    Lines that a full disk rejects wait for the next event, or for `write_waiting_events`. `kind` is one word for
    programs, such as `nan_skipped`, and `details` are JSON values.
    """
    log.warning(message)
    append_event(folder, kind, message, step=step, **details)


def append_event(
    folder: Path, kind: str, message: str, *, step: int | None = None, **details: Any
) -> None:
    """Like `record_event`, without logging."""
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = {"time": time, "kind": kind, "step": step, "rank": rank(), "message": message, **details}
    OPENED.setdefault(folder, LinesFile(folder / EVENTS)).add(json.dumps(line, default=str))


class EventHandler(logging.Handler):
    """Converts each log record with an `event` (its kind), and `details`, to an event of the run, for code without a
    run folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        kind = vars(record).get("event")
        if kind:
            append_event(self.folder, kind, record.getMessage(), **vars(record).get("details", {}))


@contextmanager
def logged_events(folder: Path) -> Iterator[None]:
    handler = EventHandler(folder)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def write_waiting_events(folder: Path) -> int:
    """Retry to write waiting events; returns how many still wait."""
    if folder in OPENED:
        return OPENED[folder].write_waiting()
    return 0


def read_events(folder: Path) -> list[dict[str, Any]]:
    return read_objects(folder / EVENTS)


def skipped_steps(folder: Path) -> int:
    """The number of steps skipped by the loss guard, without those trained again after a roll-back."""
    skipped: set[int] = set()
    for event in read_events(folder):
        if event["kind"] in ("nan_skipped", "spike_skipped"):
            skipped.add(event["step"])
        elif event["kind"] == "rolled_back" and event.get("to_step") is not None:
            skipped = {step for step in skipped if step <= event["to_step"]}
    return len(skipped)


# --- heartbeats ---

STACKS = "stacks"  # folder of the stacks that a process writes at this signal
SIGNAL_FOR_STACKS = signal.SIGUSR2

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
    """Increases with progress, so that an observer does not need this machine's clock."""
    seconds_per_step: float | None
    """Median of the last 20 steps; None with fewer than three."""
    gpu_peak_gib: float | None = None
    """Peak memory of torch on its GPU; None without a GPU."""
    pulse: int = 0
    """Increases while the process exists, even if it waits for others."""
    ended: str | None = None
    """The error that ended it; empty if it ended because of others, None while it runs."""


def write_heartbeat(folder: Path, beat: LastHeartbeat) -> None:
    """Write atomically; a full disk must neither end a run nor make it look dead."""
    path = folder / HEARTBEATS / f"rank-{beat.rank}.json"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(asdict(beat)), reuse_space=True)


def read_heartbeats(folder: Path) -> list[LastHeartbeat]:
    heartbeats = []
    for path in sorted((folder / HEARTBEATS).glob("rank-*.json")):
        try:
            heartbeats.append(LastHeartbeat(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):  # from another version, or removed meanwhile
            continue
    return sorted(heartbeats, key=lambda beat: beat.rank)


def is_of_this_host(beat: LastHeartbeat) -> bool:
    return beat.host == socket.gethostname()


def pids_here(folder: Path) -> list[int]:
    return [beat.pid for beat in read_heartbeats(folder) if is_of_this_host(beat)]


def name_processes(beats: Sequence[LastHeartbeat], everyone: Sequence[LastHeartbeat]) -> str:
    """`host-1 (process 4, 5)` if these are all processes of a host, else `process 4, 5 on host-1`."""
    names = []
    for host in sorted({beat.host for beat in beats}):
        ranks = [beat.rank for beat in beats if beat.host == host]
        ranks_of_host = [beat.rank for beat in everyone if beat.host == host]
        listed = f"process {', '.join(map(str, ranks))}"
        if len(ranks) == len(ranks_of_host):
            names.append(f"{host} ({listed})")
        else:
            names.append(f"{listed} on {host}")
    return " and ".join(names)


def remove_heartbeats(folder: Path) -> None:
    # The pattern includes the temporary files of killed processes.
    for path in (folder / HEARTBEATS).glob("*rank-*"):
        path.unlink(missing_ok=True)
