"""The tokens that a run will read of each source, and those that it has read between changes of its mixture."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from cpt.checkpoints.manifest import POSITION
from cpt.checkpoints.resume import complete_checkpoints, step_of
from cpt.data.rows.build import PreparedData, SourceReport, exceeds_max_epochs, rows_of_run
from cpt.data.rows.mixture import from_row, shares_of_phases, shares_over
from cpt.optim.schedules import phases_in_tokens
from cpt.recipe.load import saved_recipe
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Data, Recipe
from cpt.runs.folder import HISTORY, Content, read_object
from cpt.runs.history import part_after, read_history

CLOSE = 0.001  # a smaller deviation of a share is not reported
WORTHWHILE_EPOCHS = 4
"""Up to this many repeats are about as good as new text (arxiv.org/abs/2305.16264)."""


@dataclass(frozen=True, kw_only=True)
class SourceForecast(SourceReport):
    asked: float
    """Requested share of the run's tokens."""
    seen: float
    """Expected share of the run's tokens."""
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
    tokens: int
    """For the whole run, padding included."""
    rows: int
    sources: list[SourceForecast]
    phases: list[PhaseForecast]
    is_reached: bool
    """Shares are as close as whole rows allow, every source is read, and the run may start."""
    remarks: list[str]


def forecast(recipe: Recipe, data: PreparedData) -> Forecast:
    """Compute what this recipe's run will read from the prepared data, without opening rows.

    Raises:
        RecipeError: a phase ends at a learning rate that the schedule does not reach.
    """
    section = phases_in_tokens(recipe)
    num_rows = rows_of_run(recipe.data, recipe.budget, data.num_rows)
    of_sources = shares_of_phases(section, [report.tokens for report in data.sources])
    requested_shares = shares_over(of_sources, num_rows).tolist()
    shares = data.shares(num_rows)
    epochs = data.epochs(num_rows)
    sources = []
    for report, requested_share in zip(data.sources, requested_shares, strict=True):
        source = SourceForecast(
            **vars(report),
            asked=requested_share,
            seen=shares[report.name],
            epochs=epochs[report.name],
        )
        sources.append(source)
    obstacles = list(find_obstacles(recipe, section, sources, num_rows))
    return Forecast(
        name=recipe.name,
        tokens=num_rows * recipe.data.sequence_length,
        rows=num_rows,
        sources=sources,
        phases=forecast_phases(recipe, section, data, num_rows),
        is_reached=not obstacles,
        remarks=[*obstacles, *find_deviations(sources, num_rows)],
    )


def forecast_phases(
    recipe: Recipe, section: Data, data: PreparedData, num_rows: int
) -> list[PhaseForecast]:
    """Return the phases that the run reaches.

    Args:
        section: the recipe's data, with all ends of phases in tokens.
    """
    length = section.sequence_length
    phases = []
    first_row = 0
    for configured, phase in zip(recipe.data.phases, section.phases, strict=True):
        end_row = num_rows
        learning_rate = None
        if phase is not section.phases[-1]:
            learning_rate = configured.until_learning_rate
            if phase.until is not None:
                end_row = min(num_rows, round(phase.until / length))
        if end_row > first_row:
            shares = data.shares(end_row, first_row)
            phases.append(
                PhaseForecast(first_row * length, end_row * length, shares, learning_rate)
            )
        first_row = end_row
    return phases


def find_obstacles(
    recipe: Recipe, section: Data, sources: list[SourceForecast], num_rows: int
) -> Iterator[str]:
    """Yield why the mixture is not reached: a source or phase gets no row, or exceeds its allowed epochs."""
    unread = []
    for source in sources:
        if source.asked > 0 and source.seen == 0:
            unread.append(f"{source.name} ({source.asked:.2%} requested)")
    if unread:
        yield (
            f"The run has {num_rows:,} rows, too few to include {', '.join(unread)}."
            " Use shorter rows or a longer run."
        )
    length = section.sequence_length
    ends = [0]
    for phase in section.phases:
        if phase.until is not None:
            ends.append(round(phase.until / length))  # a phase ends at the nearest row
    for number, (first, end) in enumerate(pairwise(ends)):
        if first == end:
            yield f"`data.phases[{number}]` is shorter than a row of {length:,} tokens, so it reads no data."
    refusals = []
    for source in sources:
        refusal = exceeds_max_epochs(recipe.data, source.name, source.epochs, source.tokens)
        if refusal:
            refusals.append(refusal)
    if refusals:
        yield f"This run is refused: {'; '.join(refusals)}."


def find_deviations(sources: list[SourceForecast], num_rows: int) -> Iterator[str]:
    """Yield remarks about a mixture that is reached."""
    deviations = []
    repeated = []
    for source in sources:
        if abs(source.seen - source.asked) > CLOSE:
            deviations.append(f"{source.name} {source.seen:.2%} instead of {source.asked:.2%}")
        if source.epochs > WORTHWHILE_EPOCHS:
            repeated.append(f"{source.name} ({source.epochs:.1f} times)")
    if deviations:
        yield (
            f"Shares are as close as {num_rows:,} whole rows allow, each {1 / num_rows:.2%} of the run:"
            f" {', '.join(deviations)}."
        )
    if repeated:
        yield (
            f"Read more than {WORTHWHILE_EPOCHS} times, beyond which repeats are worth much less than new text"
            f" (arXiv 2305.16264): {', '.join(repeated)}."
        )
    estimated = ", ".join(source.name for source in sources if source.is_estimate)
    if estimated:
        yield (
            f"Estimated from the first chunks: {estimated}. `cpt prepare` reads all of it and makes the numbers"
            " exact."
        )


# --- what a run has read ---


@dataclass(frozen=True, kw_only=True)
class SourceRead:
    """The tokens that a run read of a source between two changes of its mixture."""

    first_step: int
    last_step: int
    first_row: int
    end_row: int
    name: str
    asked: float | None
    """Requested share of the tokens; None if it depends on the sizes of the sources, or for a retired source."""
    rows: int
    change: str
    """added, retired, or empty."""


def read_stretches(run: Path) -> list[SourceRead]:
    """The tokens that a run has read until its newest checkpoint; empty if its mixture has never changed."""
    if not (run / HISTORY).exists():
        return []
    recipe = saved_recipe(run)
    lines = part_after(read_history(run), sys.maxsize, recipe).stretches
    if not lines:
        return []
    recipes = [*(Recipe.model_validate(line["recipe"]) for line in lines), recipe]
    lines.append(newest_position(run, lines[-1]))
    sources_read: list[SourceRead] = []
    step = 0
    row = 0
    rows_before: dict[str, int] = {}
    names_before: list[str] = []
    for recipe, line in zip(recipes, lines, strict=True):
        section = phases_in_tokens(recipe)
        end_row = int(line["row"])
        names = list(map(reported_name, section.sources))
        requested_shares: dict[str, float] = {}
        if section.temperature is None:
            shares = shares_over(from_row(shares_of_phases(section, []), row), end_row - row)
            requested_shares = dict(zip(names, shares.tolist(), strict=True))
        rows = {name: position["rows"] for name, position in line["positions"].items()}
        for name in dict.fromkeys([*names, *names_before]):
            change = ""
            if name not in names:
                change = "retired"
            elif names_before and name not in names_before:
                change = "added"
            source_read = SourceRead(
                first_step=step + 1,
                last_step=line["step"],
                first_row=row,
                end_row=end_row,
                name=name,
                asked=requested_shares.get(name),
                rows=rows.get(name, 0) - rows_before.get(name, 0),
                change=change,
            )
            sources_read.append(source_read)
        step = line["step"]
        row = end_row
        rows_before = rows
        names_before = names
    return sources_read


def newest_position(run: Path, last_change: Content) -> Content:
    """Step and position of the newest checkpoint, if it is behind the last change."""
    checkpoints = complete_checkpoints(run)
    if not checkpoints:
        return last_change
    position = read_object(checkpoints[-1] / POSITION)
    if position.get("row", 0) <= last_change["row"]:
        return last_change
    return {"step": step_of(checkpoints[-1]), **position}
