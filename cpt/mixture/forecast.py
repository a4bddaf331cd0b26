"""Count what a run will read of each source, in all and in each phase, and judge whether that is what was asked."""

from dataclasses import dataclass
from itertools import pairwise

from cpt.data.mixture import asked_shares, shares_over
from cpt.data.prepared import PreparedData, SourceReport, refused, rows_of_run
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
    section = recipe.data
    rows = rows_of_run(recipe.data, recipe.budget, data.num_rows)
    asked = shares_over(asked_shares(section, [report.tokens for report in data.sources]), rows).tolist()
    seen, epochs = data.shares(rows), data.epochs(rows)
    sources = [
        SourceForecast(**vars(report), asked=share, seen=seen[report.name], epochs=epochs[report.name])
        for report, share in zip(data.sources, asked, strict=True)
    ]
    unread, short = [*never_read(sources, rows), *never_begun(section)], exhausted(recipe, sources)
    return Forecast(
        name=recipe.name,
        tokens=rows * recipe.data.sequence_length,
        rows=rows,
        sources=sources,
        phases=phases_of(section, data, rows),
        is_reached=not unread and not short,
        remarks=unread + short + far_off(sources, rows) + repeated_often(sources) + estimated(sources),
    )


def phases_of(section: Data, data: PreparedData, rows: int) -> list[PhaseForecast]:
    """The shares in each phase, as far as the run gets."""
    length = section.sequence_length
    phases, first = [], 0
    for phase in section.phases:
        is_last = phase is section.phases[-1]
        end = rows if phase.until is None or is_last else min(rows, round(phase.until / length))
        if end > first:
            phases.append(PhaseForecast(first * length, end * length, data.shares(end, first)))
        first = end
    return phases


def never_read(sources: list[SourceForecast], rows: int) -> list[str]:
    """The sources that have a share and get no row."""
    names = ", ".join(
        f"{source.name} ({source.asked:.2%} asked)" for source in sources if source.asked > 0 and source.seen == 0
    )
    return (
        [f"The run has {rows:,} rows, too few for a row of {names}. Shorter rows or a longer run have one."]
        if names
        else []
    )


def never_begun(section: Data) -> list[str]:
    """The phases that are shorter than a row: a phase ends with the row that is nearest.

    Args:
        section: the recipe's data with all phases in tokens.
    """
    ends = [0, *(round(phase.until / section.sequence_length) for phase in section.phases if phase.until is not None)]
    empty = [number for number, (first, end) in enumerate(pairwise(ends)) if first == end]
    return [
        f"`data.phases[{number}]` is shorter than a row of {section.sequence_length:,} tokens: nothing is read in it."
        for number in empty
    ]


def far_off(sources: list[SourceForecast], rows: int) -> list[str]:
    """The sources whose shares do not come out exactly: a row is the least that can be shared out, and a part of a
    short run."""
    off = [
        f"{source.name} {source.seen:.2%} instead of {source.asked:.2%}"
        for source in sources
        if abs(source.seen - source.asked) > CLOSE
    ]
    near = f"Shares come out as near as {rows:,} whole rows allow, each one {1 / rows:.2%} of the run"
    return [f"{near}: {', '.join(off)}."] if off else []


def exhausted(recipe: Recipe, sources: list[SourceForecast]) -> list[str]:
    """The sources that may not be repeated so often and would be."""
    short = [why for source in sources if (why := refused(recipe.data, source.name, source.epochs, source.tokens))]
    return [f"This run is refused: {'; '.join(short)}."] if short else []


def repeated_often(sources: list[SourceForecast]) -> list[str]:
    often = [f"{source.name} ({source.epochs:.1f} times)" for source in sources if source.epochs > WORTHWHILE_EPOCHS]
    what = (
        f"Read more than {WORTHWHILE_EPOCHS} times, beyond which repeats are worth much less than new text (arXiv"
        " 2305.16264)"
    )
    return [f"{what}: {', '.join(often)}."] if often else []


def estimated(sources: list[SourceForecast]) -> list[str]:
    """The sources of which only the first windows were counted."""
    names = ", ".join(source.name for source in sources if source.is_estimate)
    return (
        [f"Estimated from the first windows: {names}. `cpt prepare` reads all of it; the numbers are exact then."]
        if names
        else []
    )
