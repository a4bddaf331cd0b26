"""What happened to a run besides its training, in one file: each skipped batch, roll-back, restart, damaged
checkpoint, full disk."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cpt.ranks import rank
from cpt.runs.folder import EVENTS
from cpt.runs.small_files import LinesFile

log = logging.getLogger("cpt")
OPENED: dict[Path, LinesFile] = {}  # by run: the lines that wait for room must outlive the call that brought them


def record_event(folder: Path, kind: str, message: str, *, step: int | None = None, **details: Any) -> None:
    """Append one line to the run's events.jsonl, and log the sentence.

    Any process may call it, several at once too. A disk that takes no more lines ends nothing: they wait for the next
    event, or for `write_waiting_events`.

    Args:
        folder: of the run.
        kind: one word for programs, such as `nan_skipped`, `rolled_back`, `restart`, `quarantined`.
        message: one sentence for people.
        details: what programs may want besides; JSON values.
    """
    log.warning(message)
    append_event(folder, kind, message, step=step, **details)


def append_event(folder: Path, kind: str, message: str, *, step: int | None = None, **details: Any) -> None:
    """As `record_event`, without the log."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = json.dumps(
        {"time": now, "kind": kind, "step": step, "rank": rank(), "message": message, **details}, default=str
    )
    OPENED.setdefault(folder, LinesFile(folder / EVENTS)).add(line)


class EventHandler(logging.Handler):
    """Makes an event of a run of each log record that has an `event`: its kind. For code that knows nothing of
    runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        """Called by `logging`, in any thread."""
        if kind := vars(record).get("event"):
            append_event(self.folder, kind, record.getMessage())


@contextmanager
def logged_events(folder: Path) -> Iterator[None]:
    """Record such events while the run runs."""
    handler = EventHandler(folder)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def write_waiting_events(folder: Path) -> int:
    """Write what this process could not write before; how many events still wait."""
    return OPENED[folder].write_waiting() if folder in OPENED else 0


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events of a run, the oldest first; a line that a crash or a full disk cut off is left out."""
    path = folder / EVENTS
    return parsed(path.read_bytes()) if path.exists() else []


def skipped_steps(folder: Path) -> int:
    """Steps whose update the loss guard skipped; those that were trained again after a roll-back are not counted."""
    skipped: set[int] = set()
    for event in read_events(folder):
        if event["kind"] in ("nan_skipped", "spike_skipped"):
            skipped.add(event["step"])
        elif event["kind"] == "rolled_back" and event.get("to_step") is not None:
            skipped = {step for step in skipped if step <= event["to_step"]}
    return len(skipped)


def read_new_events(folder: Path, place: int) -> tuple[list[dict[str, Any]], int]:
    """The events behind a place in the file, as far as their lines are whole, and the place behind them."""
    path = folder / EVENTS
    if not path.exists():
        return [], place
    with path.open("rb") as file:
        file.seek(place)
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    return parsed(whole), place + len(whole)


def parsed(content: bytes) -> list[dict[str, Any]]:
    """The lines that are events."""
    events = []
    for line in content.decode(errors="replace").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events
