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
    stretches = []
    for line in lines:
        recipe = Recipe.model_validate(line["recipe"])
        stretch = EndedStretch(
            data=recipe.data,
            evaluation=recipe.evaluation,
            row=line["row"],
            positions={name: Position(**content) for name, content in line["positions"].items()},
            fingerprint=line["fingerprint"],
        )
        stretches.append(stretch)
    return stretches


NEW_RUN = "start a new run from this run's weights (`model.path`)"
# These keys do not change a source's rows.
NEUTRAL = {"name", "weight", "licence", "max_epochs", "replay_kl"}


def problems_of_change(earlier: Sequence[Data], current: Data) -> list[str]:
    """The changes of sources that a run with these earlier sections cannot follow; imports no torch."""
    used: dict[str, Source] = {}
    for data in earlier:
        for source in data.sources:
            used.setdefault(reported_name(source), source)
    used_names = {documents_key(source): name for name, source in used.items()}
    problems = []
    for number, source in enumerate(current.sources):
        key = f"data.sources[{number}]"
        name = reported_name(source)
        used_name = used_names.get(documents_key(source))
        if name in used:
            before = used[name].model_dump(exclude=NEUTRAL)
            after = source.model_dump(exclude=NEUTRAL)
            changed = []
            for field in after:
                if before[field] != after[field]:
                    changed.append(f"`{key}.{field}`")
            if changed:
                problems.append(
                    f"{', '.join(changed)}: the run has read `{name}` with another value, and would read documents"
                    f" twice or lose some. Restore it; or remove this source, and give a new one another `name`; or"
                    f" {NEW_RUN}."
                )
        elif used_name is not None:
            problems.append(
                f"`{key}.name`: the run has read the documents of `{name}` as `{used_name}`, and would read them again"
                f" from the beginning. Write `name: {used_name}`, with its other keys as before; or {NEW_RUN}."
            )
    return problems


def documents_key(source: Source) -> str:
    """A text that two sources of the same documents have in common."""
    path = absolute(source.path) if kind_of(source.path) in ("local", "url") else source.path
    return repr((path, sorted(source.data_files), source.subset, source.split, source.options))
