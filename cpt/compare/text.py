"""A comparison in the terminal, and as Markdown."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cpt.compare.comparison import Comparison
from cpt.compare.layout import TextTable, tables_of
from cpt.console import open_console


def print_comparison(comparison: Comparison) -> None:
    """What differs first, then the figures, then what could not be compared."""
    console = open_console()
    console.print(escape(comparison.headline()), style="bold")
    differences, figures = tables_of(comparison)
    for table in (*differences, *figures):
        print_table(table, console)
    if comparison.not_compared:
        console.print("\nNot compared:", style="bold")
        for sentence in comparison.not_compared:
            console.print(escape(f"- {sentence}"))


def print_table(table: TextTable, console: Console) -> None:
    """Its title, its rows, its remarks."""
    console.print(f"\n{escape(table.title)}", style="bold")
    if table.rows:
        shown = Table(box=None, pad_edge=False, header_style="cyan")
        for column in table.columns:
            shown.add_column(escape(column), overflow="fold")
        for row in table.rows:
            shown.add_row(*(escape(cell) for cell in row))
        console.print(shown)
    for remark in table.remarks:
        console.print(escape(remark))


def markdown(comparison: Comparison) -> str:
    """The same as one page of Markdown."""
    differences, figures = tables_of(comparison)
    parts = [f"# {plain(comparison.title)}", plain(comparison.headline())]
    parts += [section(table) for table in (*differences, *figures)]
    if comparison.not_compared:
        parts.append("## Not compared\n\n" + "\n".join(f"- {plain(sentence)}" for sentence in comparison.not_compared))
    return "\n\n".join(parts) + "\n"


def section(table: TextTable) -> str:
    """With its heading."""
    parts = [f"## {plain(table.title)}"]
    if table.rows:
        lines = [
            line(table.columns),
            line(["---"] * len(table.columns)),
            *(line([plain(cell) for cell in row]) for row in table.rows),
        ]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, *(plain(remark) for remark in table.remarks)])


def line(cells: Sequence[str]) -> str:
    """Of a table."""
    return f"| {' | '.join(cells)} |"


def plain(text: str) -> str:
    """Text that stays text, whatever names and values a user chose."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|")
    for sign in "*_<>[]":
        text = text.replace(sign, f"\\{sign}")
    return text
