"""Domain test and benchmarks: each figure with its standard error, and how far it is from the base's."""

from typing import Any

from cpt.report.found import at, mapping, mappings, number, text
from cpt.report.record import Record
from cpt.report.telling import judged, told_count
from cpt.runs.page import Section, Table
from cpt.runs.plots import Intervals

NORMAL_95 = 1.96  # standard errors to each side
COLUMNS = ("test", "metric", "questions", "base", "model", "standard error", "difference, 95 % interval", "judged")


def scores(record: Record) -> Section:
    """Of the verdict."""
    found = [*mappings(record.verdict, "domain_test"), *mappings(record.verdict, "tasks")]
    if not found:
        return Section("Domain test and benchmarks", [])
    return Section(
        "Domain test and benchmarks", [*interval_plot(found), Table(COLUMNS, [score_row(one) for one in found])]
    )


def score_row(score: dict[str, Any]) -> tuple[str, ...]:
    """One figure."""
    against, value = mapping(score, "against"), number(score, "value")
    before, low, high = (number(against, key) for key in ("before", "low", "high"))
    error = standard_error(score)
    return (
        text(score, "name"),
        text(score, "metric"),
        told_count(number(score, "questions")),
        "" if before is None else f"{before:.3f}",
        "" if value is None else f"{value:.3f}",
        "" if error is None else f"{error:.3f}",
        "none" if low is None or high is None else f"{low:+.3f} to {high:+.3f}",
        judged(against, higher_is_better=at(score, "higher_is_better") is not False),
    )


def standard_error(score: dict[str, Any]) -> float | None:
    """Half the width of the figure's own interval, in standard errors."""
    interval = at(score, "interval")
    ends = [number({"": end}, "") for end in interval] if isinstance(interval, list) else []
    if len(ends) != 2 or ends[0] is None or ends[1] is None:
        return None
    return (ends[1] - ends[0]) / 2 / NORMAL_95


def interval_plot(found: list[dict[str, Any]]) -> list[Intervals]:
    """Differences from the base."""
    rows = []
    for one in found:
        against = mapping(one, "against")
        change, low, high = (number(against, key) for key in ("difference", "low", "high"))
        if change is not None and low is not None and high is not None:
            rows.append((f"{text(one, 'name')} ({text(one, 'metric')})", change, low, high))
    note = "Points: the difference from the base. Lines: its 95 % interval, question by question."
    return [Intervals("Difference from the base", "model - base", rows, note=note)] if rows else []
