"""The tables of a comparison as rows of text, for terminal, Markdown and HTML alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cpt.compare.comparison import Comparison
from cpt.compare.rows import Row, Topic

MOST_COLUMNS = 5  # runs side by side; of more each run is a row


@dataclass(frozen=True)
class TextTable:
    """A topic, ready to be shown."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    remarks: tuple[str, ...]


def tables_of(comparison: Comparison) -> tuple[list[TextTable], list[TextTable]]:
    """What differs, and the figures."""
    names = comparison.names
    differences = [difference_table(topic, names) for topic in comparison.differences]
    return differences, [figure_table(topic, names) for topic in comparison.figures]


def difference_table(topic: Topic, names: Sequence[str]) -> TextTable:
    """A column for each run; of many runs a row for each value, with those that have it."""
    if len(names) <= MOST_COLUMNS:
        return side_by_side(topic, names)
    rows = [line for row in topic.rows for line in by_value(row, names)]
    return TextTable(topic.title, ["", "value", "runs"], rows, topic.remarks)


def figure_table(topic: Topic, names: Sequence[str]) -> TextTable:
    """A column for each run; of many runs a row for each."""
    if len(names) <= MOST_COLUMNS:
        return side_by_side(topic, names)
    rows = [[name, *(row.shown()[number] for row in topic.rows)] for number, name in enumerate(names)]
    return TextTable(topic.title, ["", *(row.name for row in topic.rows)], rows, topic.remarks)


def side_by_side(topic: Topic, names: Sequence[str]) -> TextTable:
    """A column for each run."""
    return TextTable(topic.title, ["", *names], [[row.name, *row.shown()] for row in topic.rows], topic.remarks)


def by_value(row: Row, names: Sequence[str]) -> Iterator[list[str]]:
    """A line for each value."""
    runs: dict[str, list[str]] = {}
    for name, value in zip(names, row.shown(), strict=True):
        runs.setdefault(value, []).append(name)
    for number, (value, having) in enumerate(runs.items()):
        yield [row.name if number == 0 else "", value, ", ".join(having)]
