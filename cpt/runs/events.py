"""What happened to a run besides its training, in one file: each skipped batch, roll-back, restart, damaged checkpoint, full disk."""

import json
import logging
import os
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cpt.ranks import rank

log = logging.getLogger("cpt")
FILE_NAME = "events.jsonl"


def record_event(folder: Path, kind: str, message: str, *, step: int | None = None, **details: Any) -> None:
    """Append one line to the run's events.jsonl, and log the sentence.

    Any process may call it, several at once too. A disk that takes no more lines does not end the run: the log has the sentence then.

    Args:
        folder: of the run.
        kind: one word for programs, such as `nan_skipped`, `rolled_back`, `restart`, `quarantined`.
        message: one sentence for people.
        details: what programs may want besides; JSON values.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"time": now, "kind": kind, "step": step, "rank": rank(), "message": message, **details}, default=str)
    log.warning(message)
    try:
        descriptor = os.open(folder / FILE_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(descriptor, f"{line}\n".encode())  # one write: lines of several processes do not mix
        finally:
            os.close(descriptor)
    except OSError as problem:
        log.warning(f"{folder / FILE_NAME} cannot be written: {problem.strerror}.")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events of a run, the oldest first; a line that a crash cut off is left out."""
    path = folder / FILE_NAME
    if not path.exists():
        return []
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events


def count_events(folder: Path) -> dict[str, int]:
    """How many there are of each kind."""
    return dict(Counter(str(event["kind"]) for event in read_events(folder)))
