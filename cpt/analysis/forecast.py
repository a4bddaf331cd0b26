"""What a run will read of each source, and what a changed run has read between the changes of its mixture."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cpt.checkpoints.manifest import POSITION
from cpt.checkpoints.resume import complete_checkpoints, step_of
from cpt.data.readers.account import format_account
from cpt.data.rows.build import PreparedData, SourceReport, exceeds_max_epochs, rows_of_run
from cpt.data.rows.mixture import asked_shares, from_row, shares_over
from cpt.optim.schedules import phases_in_tokens
from cpt.recipe.load import load_recipe
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Data, Recipe
from cpt.runs.folder import HISTORY, RECIPE, read_object
from cpt.runs.history import part_after, read_history

CLOSE = 0.001  # a smaller deviation of a share is not reported


WORTHWHILE_EPOCHS = (
    4  # up to this many repeats are about as good as new text (arxiv.org/abs/2305.16264)
)


@dataclass(frozen=True, kw_only=True)
class SourceForecast(SourceReport):
    asked: float  # share of the run's tokens
    seen: float  # share of the run's tokens expected in the run
    epochs: float


@dataclass(frozen=True)
class PhaseForecast:
    """The shares between two points of the run."""

    first_token: int
    end_token: int
    seen: dict[str, float]
    until_learning_rate: float | None = None
    """The share of the peak learning rate that ends the phase, if set."""


@dataclass(frozen=True)
class Forecast:
    name: str
    tokens: int  # tokens of the whole run, padding included
    rows: int
    sources: list[SourceForecast]
    phases: list[PhaseForecast]
    is_reached: (
        bool  # shares are as close as whole rows allow, every source is read, and the run may start
    )
    remarks: list[str]


def forecast(recipe: Recipe, data: PreparedData) -> Forecast:
    """Compute what this recipe's run will read from the prepared data, without opening rows. RecipeError if a phase
    ends at a learning rate that the schedule does not reach."""
    section = phases_in_tokens(recipe)
    rows = rows_of_run(recipe.data, recipe.budget, data.num_rows)
    asked = shares_over(
        asked_shares(section, [report.tokens for report in data.sources]), rows
    ).tolist()
    seen, epochs = data.shares(rows), data.epochs(rows)
    sources = [
        SourceForecast(
            **vars(report), asked=share, seen=seen[report.name], epochs=epochs[report.name]
        )
        for report, share in zip(data.sources, asked, strict=True)
    ]
    length = recipe.data.sequence_length
    phases, first = [], 0  # phases that the run reaches; `section` has all of them in tokens
    for written, phase in zip(recipe.data.phases, section.phases, strict=True):
        is_last = phase is section.phases[-1]
        end = rows if phase.until is None or is_last else min(rows, round(phase.until / length))
        if end > first:
            rate = None if is_last else written.until_learning_rate
            phases.append(
                PhaseForecast(first * length, end * length, data.shares(end, first), rate)
            )
        first = end
    obstacles = list(find_obstacles(recipe, section, sources, rows))
    return Forecast(
        name=recipe.name,
        tokens=rows * length,
        rows=rows,
        sources=sources,
        phases=phases,
        is_reached=not obstacles,
        remarks=[*obstacles, *find_deviations(sources, rows)],
    )


def find_obstacles(
    recipe: Recipe, section: Data, sources: list[SourceForecast], rows: int
) -> Iterator[str]:
    """Yield why the mixture is not reached: a source or phase gets no row, or exceeds its allowed epochs."""
    if unread := [
        f"{one.name} ({one.asked:.2%} requested)"
        for one in sources
        if one.asked > 0 and one.seen == 0
    ]:
        yield f"The run has {rows:,} rows, too few to include {', '.join(unread)}. Use shorter rows or a longer run."
    length = section.sequence_length
    ends = [
        0,
        *(round(phase.until / length) for phase in section.phases if phase.until is not None),
    ]
    for number, (first, end) in enumerate(pairwise(ends)):  # a phase ends at the nearest row
        if first == end:
            yield f"`data.phases[{number}]` is shorter than a row of {length:,} tokens, so it reads no data."
    if short := [
        why
        for one in sources
        if (why := exceeds_max_epochs(recipe.data, one.name, one.epochs, one.tokens))
    ]:
        yield f"This run is refused: {'; '.join(short)}."


def find_deviations(sources: list[SourceForecast], rows: int) -> Iterator[str]:
    """Yield remarks about a mixture that is reached."""
    if off := [one for one in sources if abs(one.seen - one.asked) > CLOSE]:
        shares = ", ".join(f"{one.name} {one.seen:.2%} instead of {one.asked:.2%}" for one in off)
        yield f"Shares are as close as {rows:,} whole rows allow, each {1 / rows:.2%} of the run: {shares}."
    if often := [
        f"{one.name} ({one.epochs:.1f} times)" for one in sources if one.epochs > WORTHWHILE_EPOCHS
    ]:
        beyond = (
            f"{WORTHWHILE_EPOCHS} times, beyond which repeats are worth much less than new text"
        )
        yield f"Read more than {beyond} (arXiv 2305.16264): {', '.join(often)}."
    if names := ", ".join(one.name for one in sources if one.is_estimate):
        yield f"Estimated from the first chunks: {names}. `cpt prepare` reads all of it and makes the numbers exact."


def print_forecast(forecast: Forecast, console: Console) -> None:
    headings = ("tokens", "documents", "held out", "asked", "seen", "epochs", "padding")
    columns = [Column(heading, justify="right", no_wrap=True) for heading in headings]
    licensed = any(source.licence for source in forecast.sources)
    title = f"Forecast of {escape(forecast.name)}"
    sources = Table("source", *columns, *(["licence"] if licensed else []), title=title)
    phases = Table("from token", "to token", title="Shares in each phase")
    for source in forecast.sources:
        name = escape(source.name)
        about = "~" if source.is_estimate else ""
        counts = [
            f"{about}{number:,}" for number in (source.tokens, source.documents, source.held_out)
        ]
        cells = (
            f"{source.asked:.2%}",
            f"{source.seen:.2%}",
            f"{source.epochs:.2f}",
            f"{source.padding:.2%}",
        )
        sources.add_row(
            name, *counts, *cells, *([escape(source.licence or "")] if licensed else [])
        )
        phases.add_column(name, justify="right")
    for phase in forecast.phases:
        end, rate = f"{phase.end_token:,}", phase.until_learning_rate
        if rate is not None:
            end += f" (learning rate at {rate:g} of its peak)"
        phases.add_row(
            f"{phase.first_token:,}", end, *(f"{share:.2%}" for share in phase.seen.values())
        )
    for table in (sources, *([phases] if forecast.phases else [])):
        console.print(table)
    for source in forecast.sources:
        console.print(format_account(source), markup=False, highlight=False)
    for remark in forecast.remarks:
        console.print(escape(remark), highlight=False)
    verdict = (
        "The mixture is reached" if forecast.is_reached else "[red]The mixture is not reached[/red]"
    )
    console.print(
        f"{verdict}: {forecast.tokens:,} tokens in {forecast.rows:,} rows.", highlight=False
    )


@dataclass(frozen=True)
class SourceRead:
    """What a run read of a source between two changes of its mixture."""

    first_step: int
    last_step: int
    first_row: int
    end_row: int
    name: str
    asked: (
        float | None
    )  # share of the tokens; None if it depends on the sizes of the sources, or for a retired one
    rows: int
    change: str  # added, retired, or empty


def read_stretches(run: Path) -> list[SourceRead]:
    """What a run has read until its newest checkpoint; empty if its mixture has never changed."""
    if not (run / HISTORY).exists():
        return []
    recipe = load_recipe(run / RECIPE)
    lines = part_after(read_history(run), sys.maxsize, recipe).stretches
    if not lines:
        return []
    recipes = [*(Recipe.model_validate(line["recipe"]) for line in lines), recipe]
    newest = complete_checkpoints(run)[-1:]
    position = {"step": step_of(newest[0]), **read_object(newest[0] / POSITION)} if newest else {}
    lines.append(position if position.get("row", 0) > lines[-1]["row"] else lines[-1])
    found, step, row, before, names = list[SourceRead](), 0, 0, dict[str, int](), list[str]()
    for recipe, line in zip(recipes, lines, strict=True):
        section, end = phases_in_tokens(recipe), int(line["row"])
        now, asked = [reported_name(source) for source in section.sources], dict[str, float]()
        if section.temperature is None:
            shares = shares_over(from_row(asked_shares(section, []), row), end - row).tolist()
            asked = dict(zip(now, shares, strict=True))
        rows = {name: one["rows"] for name, one in line["positions"].items()}
        for name in dict.fromkeys([*now, *names]):
            change = (
                "retired" if name not in now else "added" if names and name not in names else ""
            )
            read = rows.get(name, 0) - before.get(name, 0)
            found.append(
                SourceRead(step + 1, line["step"], row, end, name, asked.get(name), read, change)
            )
        step, row, before, names = line["step"], end, rows, now
    return found


def print_stretches(stretches: list[SourceRead], console: Console) -> None:
    headings = ("steps", "rows", "asked", "rows read")
    steps, *numbers = (Column(heading, justify="right", no_wrap=True) for heading in headings)
    table = Table(steps, "source", *numbers, "change", title="Read between changes of the mixture")
    for one in stretches:
        asked = "" if one.asked is None else f"{one.asked:.2%}"
        cells = f"{one.first_row:,}-{one.end_row:,}", asked, f"{one.rows:,}", one.change
        table.add_row(f"{one.first_step:,}-{one.last_step:,}", escape(one.name), *cells)
    console.print(table)
