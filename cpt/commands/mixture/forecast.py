"""Count what a run will read of each source, in all and in each phase, and judge whether that is what was asked."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from cpt.data.mixture import asked_shares, shares_over
from cpt.data.prepared import PreparedData, SourceReport, refused, rows_of_run
from cpt.optim.schedules import phases_in_tokens
from cpt.recipe.schema import Data, Recipe

CLOSE = 0.001  # share; less is not told
WORTHWHILE_EPOCHS = 4  # up to so many repeats are about as good as new text (arxiv.org/abs/2305.16264)


@dataclass(frozen=True)
class SourceForecast(SourceReport):
    asked: float
    """Share of the run's tokens."""
    seen: float
    """Share of the run's tokens that it will have."""
    epochs: float
    """How many times the run goes through it."""


@dataclass(frozen=True)
class PhaseForecast:
    """The shares between two points of the run."""

    first_token: int
    end_token: int
    seen: dict[str, float]
    until_learning_rate: float | None = None
    """Where the recipe ends it by that: the share of the peak that the learning rate has fallen to."""


@dataclass(frozen=True)
class Forecast:
    name: str
    tokens: int
    """Of the whole run, padding included."""
    rows: int
    sources: list[SourceForecast]
    phases: list[PhaseForecast]
    is_reached: bool
    """The shares come out as near as whole rows allow, no source goes unread, and the run may start."""
    remarks: list[str]
    """What a reader should know before starting."""


def forecast(recipe: Recipe, data: PreparedData) -> Forecast:
    """What this recipe's run will read; arithmetic on the prepared data, no row is looked at.

    Raises:
        RecipeError: a phase ends at a learning rate that the schedule does not come to.
    """
    section = phases_in_tokens(recipe)
    rows = rows_of_run(recipe.data, recipe.budget, data.num_rows)
    asked = shares_over(asked_shares(section, [report.tokens for report in data.sources]), rows).tolist()
    seen, epochs = data.shares(rows), data.epochs(rows)
    sources = [
        SourceForecast(**vars(report), asked=share, seen=seen[report.name], epochs=epochs[report.name])
        for report, share in zip(data.sources, asked, strict=True)
    ]
    obstacles = list(find_obstacles(recipe, section, sources, rows))
    return Forecast(
        name=recipe.name,
        tokens=rows * recipe.data.sequence_length,
        rows=rows,
        sources=sources,
        phases=phases_of(recipe, section, data, rows),
        is_reached=not obstacles,
        remarks=[*obstacles, *find_deviations(sources, rows)],
    )


def phases_of(recipe: Recipe, section: Data, data: PreparedData, rows: int) -> list[PhaseForecast]:
    """The shares in each phase, as far as the run gets.

    Args:
        section: the recipe's data with all phases in tokens.
    """
    length = section.sequence_length
    phases, first = [], 0
    for written, phase in zip(recipe.data.phases, section.phases, strict=True):
        is_last = phase is section.phases[-1]
        end = rows if phase.until is None or is_last else min(rows, round(phase.until / length))
        if end > first:
            rate = None if is_last else written.until_learning_rate
            phases.append(PhaseForecast(first * length, end * length, data.shares(end, first), rate))
        first = end
    return phases


def find_obstacles(recipe: Recipe, section: Data, sources: list[SourceForecast], rows: int) -> Iterator[str]:
    """Why the mixture is not reached: a source or phase gets no row, or a source may not be repeated so often.

    Args:
        section: the recipe's data with all phases in tokens.
    """
    if unread := [f"{one.name} ({one.asked:.2%} asked)" for one in sources if one.asked > 0 and one.seen == 0]:
        yield f"The run has {rows:,} rows, too few for a row of {', '.join(unread)}. Use shorter rows or a longer run."
    length = section.sequence_length
    ends = [0, *(round(phase.until / length) for phase in section.phases if phase.until is not None)]
    for number, (first, end) in enumerate(pairwise(ends)):  # a phase ends with the row that is nearest
        if first == end:
            yield f"`data.phases[{number}]` is shorter than a row of {length:,} tokens: nothing is read in it."
    if short := [why for one in sources if (why := refused(recipe.data, one.name, one.epochs, one.tokens))]:
        yield f"This run is refused: {'; '.join(short)}."


def find_deviations(sources: list[SourceForecast], rows: int) -> Iterator[str]:
    """What a reader should know about a mixture that is reached."""
    if off := [
        f"{one.name} {one.seen:.2%} instead of {one.asked:.2%}" for one in sources if abs(one.seen - one.asked) > CLOSE
    ]:
        yield (
            f"Shares come out as near as {rows:,} whole rows allow, each one {1 / rows:.2%} of the run:"
            f" {', '.join(off)}."
        )
    if often := [f"{one.name} ({one.epochs:.1f} times)" for one in sources if one.epochs > WORTHWHILE_EPOCHS]:
        yield (
            f"Read more than {WORTHWHILE_EPOCHS} times, beyond which repeats are worth much less than new text (arXiv"
            f" 2305.16264): {', '.join(often)}."
        )
    if names := [one.name for one in sources if one.is_estimate]:
        yield (
            f"Estimated from the first windows: {', '.join(names)}. `cpt prepare` reads all of it; the numbers are"
            " exact then."
        )
