"""What YAML files say, with the file and line of every value, so that a mistake can be shown where it was written."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cpt.errors import RecipeError

Location = tuple[str | int, ...]
"""The way to a value: `("data", "sources", 0, "weight")`."""


@dataclass(frozen=True, order=True)
class Place:
    """Where something was written. Line 0: not in a file but on the command line."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass
class Node:
    """A value with its place; of a key's value, the place of the key."""

    value: Any
    """None, bool, int, float, str, a list of nodes, or a dict of nodes."""
    place: Place
    own_file: bool = False
    """The section names the file that it is based on, so nothing of an outer base flows into it."""
    broken: bool = False
    """What stands here could not be read, which was already said: expect nothing of it."""


class Mistakes:
    """Collects what is wrong with a recipe, to say all of it at once."""

    def __init__(self) -> None:
        self.found: set[tuple[Place, str]] = set()

    def add(self, place: Place, text: str) -> None:
        self.found.add((place, text))

    def raise_if_any(self) -> None:
        """Raise one RecipeError with a line `file:line: what is wrong` for each mistake; the command line's come
        last."""
        if self.found:
            in_order = sorted(self.found, key=lambda mistake: (mistake[0].line == 0, *mistake))
            raise RecipeError("\n".join(f"{place}: {text}" for place, text in in_order))


def plain(node: Node) -> Any:
    """The value without its places."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def children(node: Node) -> list[Node]:
    """The nodes right below."""
    return (
        list(node.value.values())
        if isinstance(node.value, dict)
        else node.value
        if isinstance(node.value, list)
        else []
    )


def holds_broken(node: Node) -> bool:
    """True when the node or something below it could not be read."""
    return node.broken or any(holds_broken(child) for child in children(node))


def nodes_along(root: Node, location: Location) -> list[Node]:
    """The nodes from the root towards `location`, as far as they were written."""
    nodes = [root]
    for step in location:
        here = nodes[-1].value
        if isinstance(here, dict) and step in here:
            nodes.append(here[step])  # type: ignore[index]
        elif isinstance(here, list) and isinstance(step, int) and step < len(here):
            nodes.append(here[step])
        else:
            break
    return nodes


def node_at(root: Node, location: Location) -> Node | None:
    """The node at `location`, if it was written."""
    nodes = nodes_along(root, location)
    return nodes[-1] if len(nodes) == len(location) + 1 else None


def place_of(root: Node, location: Location) -> Place:
    """The place of the deepest part of `location` that was written."""
    return nodes_along(root, location)[-1].place


def is_broken(root: Node, location: Location) -> bool:
    """True when `location` lies in a part that could not be read."""
    return any(node.broken for node in nodes_along(root, location))


def merged(over: Node, base: Node) -> Node:
    """`over` on top of `base`: keys of both are merged at every depth, lists and single values replace."""
    if over.own_file or not (isinstance(over.value, dict) and isinstance(base.value, dict)):
        return over
    together = dict(base.value)
    for key, child in over.value.items():
        together[key] = merged(child, base.value[key]) if key in base.value else child
    return Node(together, over.place, broken=over.broken or base.broken)


def dotted(location: Iterable[str | int]) -> str:
    """`data.sources[0].weight`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).removeprefix(".")


def steps_of(key: str) -> Location:
    """`("data", "sources", 0, "weight")` of `data.sources[0].weight` or `data.sources.0.weight`."""
    return tuple(int(step) if step.isdigit() else step for step in re.sub(r"\[(\d+)\]", r".\1", key).split("."))
