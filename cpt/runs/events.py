"""The run's events.jsonl: each skipped batch, roll-back, restart, damaged checkpoint, full disk."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cpt.distributed import rank
from cpt.files import LinesFile
from cpt.runs.folder import EVENTS, read_objects

log = logging.getLogger("cpt")
OPENED: dict[Path, LinesFile] = {}  # by run: lines that a full disk did not take must outlive the call


def record_event(folder: Path, kind: str, message: str, *, step: int | None = None, **details: Any) -> None:
    """Append one line to the run's events.jsonl, and log the sentence; several processes may call it at once.

    Lines that a full disk does not take wait for the next event, or for `write_waiting_events`. `kind` is one word for
    programs, such as `nan_skipped`, and `details` are JSON values.
    """
    log.warning(message)
    append_event(folder, kind, message, step=step, **details)


def append_event(folder: Path, kind: str, message: str, *, step: int | None = None, **details: Any) -> None:
    """Like `record_event`, without the log."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = {"time": now, "kind": kind, "step": step, "rank": rank(), "message": message, **details}
    OPENED.setdefault(folder, LinesFile(folder / EVENTS)).add(json.dumps(line, default=str))


class EventHandler(logging.Handler):
    """Turns each log record with an `event` (its kind) into an event of the run, for code that knows no runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        if kind := vars(record).get("event"):
            append_event(self.folder, kind, record.getMessage())


@contextmanager
def logged_events(folder: Path) -> Iterator[None]:
    handler = EventHandler(folder)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def write_waiting_events(folder: Path) -> int:
    """Try again to write waiting events; returns how many still wait."""
    return OPENED[folder].write_waiting() if folder in OPENED else 0


def read_events(folder: Path) -> list[dict[str, Any]]:
    return read_objects(folder / EVENTS)


def skipped_steps(folder: Path) -> int:
    """The number of steps that the loss guard skipped, without those trained again after a roll-back."""
    skipped: set[int] = set()
    for event in read_events(folder):
        if event["kind"] in ("nan_skipped", "spike_skipped"):
            skipped.add(event["step"])
        elif event["kind"] == "rolled_back" and event.get("to_step") is not None:
            skipped = {step for step in skipped if step <= event["to_step"]}
    return len(skipped)
