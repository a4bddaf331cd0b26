"""A table with a row for each thing that is compared and a column for each run."""

from collections.abc import Iterable
from dataclasses import dataclass

NOT_KNOWN = "?"


@dataclass(frozen=True)
class Row:
    """One thing of every run."""

    name: str
    values: tuple[str | None, ...]
    """As people read it, by run; None where it is not known, which is no difference."""
    numbers: tuple[float | None, ...] = ()
    """The same for programs, where they are figures."""

    @property
    def differs(self) -> bool:
        """Two runs are known to have different values."""
        return len({value for value in self.values if value is not None}) > 1

    def shown(self) -> list[str]:
        """The values as a table has them."""
        return [NOT_KNOWN if value is None else value for value in self.values]


@dataclass(frozen=True)
class Topic:
    """Rows that belong together."""

    title: str
    rows: tuple[Row, ...]
    remarks: tuple[str, ...] = ()
    """Sentences beneath the table."""

    @property
    def is_empty(self) -> bool:
        """There is nothing to show."""
        return not self.rows and not self.remarks


def differing(title: str, rows: Iterable[Row]) -> Topic:
    """Those that differ."""
    return Topic(title, tuple(row for row in rows if row.differs))


def known(title: str, rows: Iterable[Row], remarks: Iterable[str] = ()) -> Topic:
    """Those of which something is known."""
    return Topic(title, tuple(row for row in rows if any(value is not None for value in row.values)), tuple(remarks))
