"""What a converter gives: the text with its title, or the reason why there is none."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Converted:
    """A document as text: headings begin with `#`, list items with `-` or a number, rows of tables stand between `|`."""

    text: str
    title: str | None = None
    pages: int | None = None
    """Of formats that have pages."""


class NotConverted(Exception):  # noqa: N818 -- it is caught where it is raised, and becomes a line of failed.jsonl
    """Why a file gives no document."""

    def __init__(self, reason: str, detail: str = "") -> None:
        """Keep the reason in a few words that many files share, to count by, and what exactly is wrong with this one."""
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail or reason
