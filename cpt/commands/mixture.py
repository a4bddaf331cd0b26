"""`cpt mixture RECIPE`: forecast what a run will read of each source, or show what a changed run has read."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cpt.command_line import AsJson, Overrides, RecipePath, print_json
from cpt.data.readers.account import format_account
from cpt.formatting import open_console
from cpt.recipe.load import load_recipe
from cpt.runs.folder import RECIPE, find_run

if TYPE_CHECKING:
    from cpt.analysis.forecast import Forecast, SourceRead


def command(
    recipe: RecipePath,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Count what a run will read of each source. For the folder of a run whose mixture changed, count what it has read
    of each source between the changes.

    Exit code 2 if a source gets no row, or would need more epochs than the recipe allows.

    Example: cpt mixture recipe.yaml
    """
    if not recipe.is_file() and recipe.suffix not in (".yaml", ".yml"):
        folder = find_run(str(recipe))
        if print_read(folder, as_json=as_json):
            return
        recipe = folder / RECIPE
    loaded = load_recipe(recipe, overrides or ())

    from cpt.analysis.forecast import forecast  # torch, which takes seconds
    from cpt.data.rows.build import data_of
    from cpt.tokenizer.load import load_tokenizer

    tokenizer = load_tokenizer(loaded.tokenizer, loaded.model)
    # A budget that is too small is a remark of the forecast, not an error.
    prepared = data_of(loaded, tokenizer, checks_budget=False)
    expected = forecast(loaded, prepared)
    if as_json:
        print_json(asdict(expected))
    else:
        print_forecast(expected, open_console())
    raise typer.Exit(0 if expected.is_reached else 2)


def print_read(run: Path, *, as_json: bool) -> bool:
    """Print what the run has read between the changes of its mixture; False if it has never changed."""
    from cpt.analysis.forecast import read_stretches

    sources_read = read_stretches(run)
    if sources_read and as_json:
        print_json(list(map(asdict, sources_read)))
    elif sources_read:
        print_sources_read(sources_read, open_console())
    return bool(sources_read)


def print_sources_read(sources_read: Sequence["SourceRead"], console: Console) -> None:
    headings = ("steps", "rows", "asked", "rows read")
    steps, *numbers = (Column(heading, justify="right", no_wrap=True) for heading in headings)
    table = Table(steps, "source", *numbers, "change", title="Read between changes of the mixture")
    for source in sources_read:
        table.add_row(
            f"{source.first_step:,}-{source.last_step:,}",
            escape(source.name),
            f"{source.first_row:,}-{source.end_row:,}",
            "" if source.asked is None else f"{source.asked:.2%}",
            f"{source.rows:,}",
            source.change,
        )
    console.print(table)


def print_forecast(forecast: "Forecast", console: Console) -> None:
    console.print(table_of_sources(forecast))
    if forecast.phases:
        console.print(table_of_phases(forecast))
    for source in forecast.sources:
        console.print(format_account(source), markup=False, highlight=False)
    for remark in forecast.remarks:
        console.print(escape(remark), highlight=False)
    outcome = "The mixture is reached"
    if not forecast.is_reached:
        outcome = "[red]The mixture is not reached[/red]"
    console.print(
        f"{outcome}: {forecast.tokens:,} tokens in {forecast.rows:,} rows.", highlight=False
    )


def table_of_sources(forecast: "Forecast") -> Table:
    headings = ("tokens", "documents", "held out", "asked", "seen", "epochs", "padding")
    columns = [Column(heading, justify="right", no_wrap=True) for heading in headings]
    table = Table("source", *columns, title=f"Forecast of {escape(forecast.name)}")
    has_licences = any(source.licence for source in forecast.sources)
    if has_licences:
        table.add_column("licence")
    for source in forecast.sources:
        about = "~" if source.is_estimate else ""
        cells = [
            escape(source.name),
            f"{about}{source.tokens:,}",
            f"{about}{source.documents:,}",
            f"{about}{source.held_out:,}",
            f"{source.asked:.2%}",
            f"{source.seen:.2%}",
            f"{source.epochs:.2f}",
            f"{source.padding:.2%}",
        ]
        if has_licences:
            cells.append(escape(source.licence or ""))
        table.add_row(*cells)
    return table


def table_of_phases(forecast: "Forecast") -> Table:
    table = Table("from token", "to token", title="Shares in each phase")
    for source in forecast.sources:
        table.add_column(escape(source.name), justify="right")
    for phase in forecast.phases:
        end = f"{phase.end_token:,}"
        if phase.until_learning_rate is not None:
            end += f" (learning rate at {phase.until_learning_rate:g} of its peak)"
        shares = [f"{share:.2%}" for share in phase.seen.values()]
        table.add_row(f"{phase.first_token:,}", end, *shares)
    return table
