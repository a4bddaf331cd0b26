"""`cpt mixture RECIPE`: what the run will read of each source, before it starts."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cpt.commands.mixture.forecast import Forecast, SourceForecast, forecast
from cpt.console import open_console
from cpt.data.build import build_data
from cpt.data.readers.columns import form_of_stage
from cpt.optim.schedules import phases_in_tokens
from cpt.recipe.load import load_recipe
from cpt.tokenizer.load import load_tokenizer

BARS = " ▁▂▃▄▅▆▇█"
SHORTEST, LONGEST = 4, 20  # of the histogram: powers of two; what is shorter or longer stands at the ends


def print_forecast(forecast: Forecast, console: Console) -> None:
    console.print(sources_table(forecast))
    console.print(documents_table(forecast))
    if forecast.phases:
        console.print(phases_table(forecast))
    for remark in forecast.remarks:
        console.print(escape(remark), highlight=False)
    verdict = "The mixture is reached" if forecast.is_reached else "[red]The mixture is not reached[/red]"
    console.print(f"{verdict}: {forecast.tokens:,} tokens in {forecast.rows:,} rows.", highlight=False)


def sources_table(forecast: Forecast) -> Table:
    table = Table(title=f"What {escape(forecast.name)} will read")
    table.add_column("source")
    for heading in ("tokens", "documents", "held out", "asked", "seen", "epochs", "padding"):
        table.add_column(heading, justify="right", no_wrap=True)
    licensed = any(source.licence for source in forecast.sources)
    if licensed:
        table.add_column("licence")
    for source in forecast.sources:
        about = "~" if source.is_estimate else ""
        counts = [f"{about}{number:,}" for number in (source.tokens, source.documents, source.held_out)]
        figures = f"{source.asked:.2%}", f"{source.seen:.2%}", f"{source.epochs:.2f}", f"{source.padding:.2%}"
        table.add_row(escape(source.name), *counts, *figures, *([escape(source.licence or "")] if licensed else []))
    return table


def documents_table(forecast: Forecast) -> Table:
    """How long each source's documents are, and what was left out of it."""
    table = Table("source", title=f"Documents by length, from 2^{SHORTEST} to 2^{LONGEST} tokens")
    table.add_column("length", no_wrap=True)
    table.add_column("left out")
    for source in forecast.sources:
        table.add_row(escape(source.name), histogram(source), escape(left_out(source)) or "nothing")
    return table


def phases_table(forecast: Forecast) -> Table:
    """A row for each phase, a column for each source."""
    table = Table("from token", "to token", title="Shares in each phase")
    for source in forecast.sources:
        table.add_column(escape(source.name), justify="right")
    for phase in forecast.phases:
        rate = (
            ""
            if phase.until_learning_rate is None
            else f" (learning rate at {phase.until_learning_rate:g} of its peak)"
        )
        table.add_row(
            f"{phase.first_token:,}", f"{phase.end_token:,}{rate}", *(f"{share:.2%}" for share in phase.seen.values())
        )
    return table


def histogram(source: SourceForecast) -> str:
    """A bar for each power of two, as high as its share of the documents."""
    heights = [0] * (LONGEST - SHORTEST + 1)
    for length, count in source.lengths.items():
        heights[min(max(length.bit_length() - 1, SHORTEST), LONGEST) - SHORTEST] += count
    return "".join(BARS[-(-height * (len(BARS) - 1) // max(heights))] for height in heights)


def left_out(source: SourceForecast) -> str:
    """`12 shorter than 200 characters, 3 bad rows (invalid UTF-8)`."""
    dropped = [f"{count:,} {reason}" for reason, count in source.dropped.items()]
    return ", ".join(dropped + [f"{count:,} bad rows ({reason})" for reason, count in source.bad_rows.items()])


# --- command ---


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Count what a run will see of each source.

    Exit code 2 where a source gets no row, or more is asked of it than the recipe allows.

    Example: cpt mixture recipe.yaml
    """
    loaded = load_recipe(recipe, overrides or ())
    data = build_data(  # without the budget: the forecast reports sources that run out
        phases_in_tokens(loaded),
        load_tokenizer(loaded.tokenizer, loaded.model),
        seed=loaded.seed,
        evaluation=loaded.evaluation,
        form=form_of_stage(loaded.stage),
    )
    found = forecast(loaded, data)
    if as_json:
        sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n")
    else:
        print_forecast(found, open_console())
    raise typer.Exit(0 if found.is_reached else 2)
