"""The stretches of a run before its mixture changed, and the changes that would read documents twice or lose some."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpt.data.readers.sources import absolute, kind_of
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Data, Evaluation, Recipe, Source


@dataclass(frozen=True)
class Position:
    """How far a run has read a source."""

    rows: int
    fingerprint: str
    """The fingerprint of the source's rows."""
    filled: float = 1.0
    """Share of these rows that is tokens; the rest is padding."""


@dataclass(frozen=True)
class EndedStretch:
    """A stretch of a run before its mixture changed."""

    data: Data
    evaluation: Evaluation
    row: int
    """The global row at which the next stretch begins."""
    positions: Mapping[str, Position]
    """The positions of all sources of the run so far before this row, in order of first use."""
    fingerprint: str


def ended_stretches(lines: Sequence[Mapping[str, Any]]) -> list[EndedStretch]:
    """From lines of a run's history (cpt.runs.history), each at the end of a stretch."""
    found = []
    for line in lines:
        recipe = Recipe.model_validate(line["recipe"])
        positions = {name: Position(**position) for name, position in line["positions"].items()}
        found.append(
            EndedStretch(
                recipe.data, recipe.evaluation, line["row"], positions, line["fingerprint"]
            )
        )
    return found


NEW_RUN = "start a new run from this run's weights (`model.path`)"
NEUTRAL = {
    "name",
    "weight",
    "licence",
    "max_epochs",
    "replay_kl",
}  # these keys do not change a source's rows


def problems_of_change(earlier: Sequence[Data], now: Data) -> list[str]:
    """The changes of sources that a run with these earlier sections cannot follow; imports no torch."""
    used: dict[str, Source] = {}
    for source in (source for data in earlier for source in data.sources):
        used.setdefault(reported_name(source), source)
    name_of = {texts_of(source): name for name, source in used.items()}
    problems = []
    for number, source in enumerate(now.sources):
        key, name = f"data.sources[{number}]", reported_name(source)
        if name in used:
            before, after = (one.model_dump(exclude=NEUTRAL) for one in (used[name], source))
            if changed := [f"`{key}.{field}`" for field in after if before[field] != after[field]]:
                problems.append(
                    f"{', '.join(changed)}: the run has read `{name}` with another value, and would read documents"
                    f" twice or lose some. Restore it; or remove this source, and give a new one another `name`; or"
                    f" {NEW_RUN}."
                )
        elif (other := name_of.get(texts_of(source))) is not None:
            problems.append(
                f"`{key}.name`: the run has read the documents of `{name}` as `{other}`, and would read them again"
                f" from the beginning. Write `name: {other}`, with its other keys as before; or {NEW_RUN}."
            )
    return problems


def texts_of(source: Source) -> str:
    """A text that two sources of the same documents have in common."""
    path = absolute(source.path) if kind_of(source.path) in ("local", "url") else source.path
    return repr((path, sorted(source.data_files), source.subset, source.split, source.options))
