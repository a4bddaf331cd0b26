"""`cpt compare RUN RUN ...`: a comparison in the terminal, as HTML or as JSON."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column
from rich.table import Table as RichTable

from cpt.analysis.compare import (
    MOST_COLUMNS,
    ComparedRun,
    Comparison,
    Topic,
    comparable_losses,
    compare,
    held_out_metrics,
)
from cpt.analysis.page import Curve, Part, Plot, Table, curves, html_page, write_page
from cpt.command_line import AsJson, print_json
from cpt.errors import CheckpointError
from cpt.formatting import open_console
from cpt.runs.folder import find_run


def command(
    runs: Annotated[
        list[str], typer.Argument(help="Folders, or names below runs/; the first is the reference.")
    ],
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page with curves.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: recipes, versions, code, machines, data; then losses at the same tokens, held-out text, speed,
    memory, events.

    The end lists what could not be compared.

    Example: cpt compare with-replay without-replay --html comparison.html
    """
    if len(runs) < 2:
        raise CheckpointError(f"name a second run: cpt compare {runs[0]} RUN")
    comparison = compare(list(map(find_run, runs)))
    if as_json:
        print_json(comparison.to_json())
    else:
        print_comparison(comparison)
    if html is not None:
        write_page(html, comparison_page(comparison))


def print_comparison(comparison: Comparison) -> None:
    console = open_console()
    console.print(escape(comparison.headline()), style="bold")
    for table in tables_of([*comparison.differences, *comparison.results], comparison.runs):
        console.print(f"\n{escape(table.title)}", style="bold")
        columns = [Column(escape(column), overflow="fold") for column in table.columns]
        printed = RichTable(*columns, box=None, pad_edge=False, header_style="cyan")
        for row in table.rows:
            printed.add_row(*map(escape, row))
        console.print(printed)
    if comparison.not_compared:
        console.print("\nNot compared:", style="bold")
        for sentence in comparison.not_compared:
            console.print(escape(f"- {sentence}"))


def tables_of(topics: Iterable[Topic], runs: Sequence[ComparedRun]) -> Iterator[Table]:
    """Yield each topic as a table: a column per run, or a row per run if there are many."""
    for topic in topics:
        lines = [["", *(run.name for run in runs)]]
        for row in topic.rows:
            lines.append([row.name, *("?" if value is None else value for value in row.values)])
        if len(runs) > MOST_COLUMNS:
            lines = list(map(list, zip(*lines, strict=True)))
        yield Table(lines[0], lines[1:], topic.title)


def comparison_page(comparison: Comparison) -> str:
    sections: dict[str, Sequence[Part]] = {
        "Differences of setup": list(tables_of(comparison.differences, comparison.runs)),
        "Curves": plots(comparison.runs),
        "Results of the runs": list(tables_of(comparison.results, comparison.runs)),
        "Not compared": comparison.not_compared,
    }
    return html_page("Comparison", sections, comparison.headline())


def plots(runs: Sequence[ComparedRun]) -> list[Plot]:
    """Losses, held-out sets and speed over tokens, one curve per run."""
    are_comparable = comparable_losses(runs, [])
    losses = []
    for curve, is_comparable in zip(curves_of(runs, "loss_smoothed"), are_comparable, strict=True):
        if is_comparable:
            losses.append(curve)
    drawn = curves("Training loss", "nats per token", losses)
    for name, metric in held_out_metrics(runs).items():
        drawn += curves(f"Held-out text: {name}", "bits per byte", curves_of(runs, metric))
    return drawn + curves("Speed", "tokens/s", curves_of(runs, "tokens_per_second"))


def curves_of(runs: Sequence[ComparedRun], metric: str) -> list[Curve]:
    """Every run has its color in all plots."""
    curves = []
    for number, run in enumerate(runs):
        curves.append(Curve(run.name, *run.record.metrics.curve(metric), color=number))
    return curves
