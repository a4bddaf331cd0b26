"""What happened to the run besides its training: as marks on the curves, and as a table."""

from collections import Counter
from typing import Any

from cpt.report.found import number, text
from cpt.report.record import Record
from cpt.report.telling import told_count
from cpt.runs.page import Section, Table

FIRST, LAST = 100, 100  # events of a table
LONGEST = 120


def marks(record: Record) -> list[tuple[float, str]]:
    """Where on the axis of tokens each event with a step stands."""
    per_step = record.tokens_per_step
    found = []
    for event in record.events:
        step = number(event, "step")
        if step is not None and per_step:
            message = text(event, "message")
            told = message if len(message) <= LONGEST else f"{message[:LONGEST]}..."
            found.append((step * per_step, f"step {step:.0f}, {kind(event)}: {told}"))
    return found


def events(record: Record) -> Section:
    """In the order in which they happened."""
    if not record.events:
        return Section("Events", [])
    shown = record.events if len(record.events) <= FIRST + LAST else [*record.events[:FIRST], *record.events[-LAST:]]
    rows = [(when(event), told_count(number(event, "step")), kind(event), text(event, "message")) for event in shown]
    counts = Counter(kind(event) for event in record.events)
    summary = ", ".join(f"{name} {count:,}" for name, count in counts.most_common())
    left_out = len(record.events) - len(shown)
    more = f" The table leaves out {left_out:,} in the middle." if left_out else ""
    return Section(
        "Events",
        [
            f"{len(record.events):,} in all: {summary}.{more}",
            Table(("time (UTC)", "step", "kind", "what happened"), rows),
        ],
    )


def kind(event: dict[str, Any]) -> str:
    """One word."""
    return text(event, "kind") or "unknown"


def when(event: dict[str, Any]) -> str:
    """To the second."""
    return text(event, "time")[:19].replace("T", " ")
