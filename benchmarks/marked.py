"""Tables in Markdown, and the part of a page that a command writes between two markers."""

from collections.abc import Sequence


def with_part(text: str, begin: str, end: str, part: str, page: str) -> str:
    """The text with its part between the markers made anew.

    Args:
        page: its name, for whoever has lost a marker.
    """
    before, _, rest = text.partition(begin)
    _, marker, after = rest.partition(end)
    if not marker:
        raise SystemExit(f"{page} has no lines {begin.strip()} and {end.strip()}")
    return f"{before}{begin}{part}{end}{after}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is aligned left, the others right."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, rule, *rows))
