"""What a rule between sections says when it is broken, and where else the contradiction was written."""

from collections.abc import Iterator
from dataclasses import dataclass

from cpt.recipe.tree import Location, Node, dotted, node_at, place_of


@dataclass(frozen=True)
class Senseless:
    """Something that does not fit: shown at `location`, with the line of `other` where that was written too."""

    location: Location
    text: str
    other: Location | None = None


Found = Iterator[Senseless]


def line_of_other(found: Senseless, root: Node) -> str:
    """` (line 12: `budget.tokens`)`, where the other side of a contradiction was written."""
    other = node_at(root, found.other) if found.other else None
    here = place_of(root, found.location)
    if other is None or found.other is None or not other.place.line and other.place == here:
        return ""
    is_same_file = other.place.line and other.place.file == here.file
    return f" (`{dotted(found.other)}`: {f'line {other.place.line}' if is_same_file else other.place})"
