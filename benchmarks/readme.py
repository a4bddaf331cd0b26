"""The tables of benchmarks/README.md and recipes/README.md: each command writes its own, between two markers."""

from collections.abc import Sequence
from pathlib import Path

README = Path(__file__).with_name("README.md")


def write_part(command: str, part: str, page: Path = README) -> None:
    """Replace the part of a command in a page.

    Args:
        command: a module, as `benchmarks.step`; the markers name it.
    """
    begin, end = (f"<!-- python -m {command}: {word} -->\n" for word in ("begin", "end"))
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, marker, after = rest.partition(end)
    if not marker:
        raise SystemExit(f"{page} has no lines {begin.strip()} and {end.strip()}")
    page.write_text(f"{before}{begin}{part}{end}{after}", encoding="utf-8")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is aligned left, the others right."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, rule, *rows))
