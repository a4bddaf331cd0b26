"""Read YAML 1.2, without PyYAML's YAML 1.1 surprises, into a tree with the file and line of every value."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cpt.errors import RecipeError
from cpt.plugins import closest

Location = tuple[str | int, ...]
"""The steps to a value: `("data", "sources", 0, "weight")`."""


@dataclass(frozen=True, order=True)
class FilePosition:
    """File and line of a value. Line 0: on the command line."""

    file: str
    line: int

    def __str__(self) -> str:
        if self.line:
            return f"{self.file}:{self.line}"
        return self.file

    def seen_from(self, other: "FilePosition") -> str:
        if self.line and self.file == other.file:
            return f"line {self.line}"
        return str(self)


@dataclass
class Node:
    """A value with its position; for a value with a key, the position of the key."""

    value: Any
    """None, bool, int, float, str, a list of nodes, or a dict of nodes."""
    position: FilePosition
    own_file: bool = False
    """The section names its own base file, so it inherits nothing from an outer base."""
    broken: bool = False
    """The value could not be read, which is already reported: do not report it again."""


class UnreadableError(Exception):
    """The file cannot be read; `Mistakes` has the reason."""


class Mistakes:
    """Collects the mistakes in a recipe, to report them together."""

    def __init__(self) -> None:
        self.entries: set[tuple[FilePosition, str]] = set()

    def add(self, position: FilePosition, text: str) -> None:
        self.entries.add((position, text))

    def unreadable(self, position: FilePosition, text: str) -> UnreadableError:
        """Add a mistake that makes the whole file unreadable, and return the error to raise."""
        self.add(position, text)
        return UnreadableError()

    def raise_if_any(self) -> None:
        """Raise one RecipeError with a line `file:line: what is wrong` for each mistake; those of the command line
        come last."""
        if self.entries:
            in_order = sorted(self.entries, key=lambda mistake: (mistake[0].line == 0, *mistake))
            raise RecipeError("\n".join(f"{position}: {text}" for position, text in in_order))


def plain(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def holds_broken(node: Node) -> bool:
    """Whether the node or a node below it could not be read."""
    if node.broken:
        return True
    children: Iterable[Node] = ()
    if isinstance(node.value, dict):
        children = node.value.values()
    elif isinstance(node.value, list):
        children = node.value
    return any(map(holds_broken, children))


def nodes_along(root: Node, location: Location) -> list[Node]:
    """The nodes from the root towards `location`, as far as they were written."""
    nodes = [root]
    for step in location:
        parent = nodes[-1].value
        is_in_list = isinstance(parent, list) and isinstance(step, int) and step < len(parent)
        is_in_section = isinstance(parent, dict) and step in parent
        if not is_in_list and not is_in_section:
            break
        nodes.append(parent[step])
    return nodes


def node_at(root: Node, location: Location) -> Node | None:
    """The node at `location`, if it was written."""
    nodes = nodes_along(root, location)
    if len(nodes) == len(location) + 1:
        return nodes[-1]
    return None


def position_of(root: Node, location: Location) -> FilePosition:
    """The position of the deepest part of `location` that was written."""
    return nodes_along(root, location)[-1].position


def merged(over: Node, base: Node) -> Node:
    """Merge `over` into `base`: keys are merged at every depth, lists and single values are replaced."""
    if over.own_file or not (isinstance(over.value, dict) and isinstance(base.value, dict)):
        return over
    entries = dict(base.value)
    for key, child in over.value.items():
        if key in base.value:
            entries[key] = merged(child, base.value[key])
        else:
            entries[key] = child
    return Node(entries, over.position, broken=over.broken or base.broken)


def dotted(location: Iterable[str | int]) -> str:
    """`data.sources[0].weight`."""
    key = ""
    for step in location:
        if isinstance(step, int):
            key += f"[{step}]"
        else:
            key += f".{step}"
    return key.removeprefix(".")


def leaves(value: Any, above: Location = ()) -> Iterator[tuple[Location, Any]]:
    """Yield the deepest keys of a section with their values; a list without sections is a value."""
    children: Any = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        children = enumerate(value)
    for key, child in children:
        yield from leaves(child, (*above, key))
    if not children:
        yield above, value


def steps_of(key: str) -> Location:
    """`("data", "sources", 0, "weight")` of `data.sources[0].weight` or `data.sources.0.weight`."""
    steps: list[str | int] = []
    for step in re.sub(r"\[(\d+)\]", r".\1", key).split("."):
        if step.isdigit():
            steps.append(int(step))
        else:
            steps.append(step)
    return tuple(steps)


# nested aliases grow exponentially
MAX_DEPTH = 40
MAX_NODES = 50_000
NOT_TEXT = re.compile(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

DIGITS = r"[0-9]+(?:_[0-9]+)*"
INTEGER = re.compile(rf"[-+]?{DIGITS}")
FLOAT = re.compile(rf"[-+]?(?:\.{DIGITS}|{DIGITS}(?:\.(?:{DIGITS})?)?)(?:[eE][-+]?[0-9]+)?")
LEADING_ZERO = re.compile(r"[-+]?0[0-9_]*[0-9]")
CONSTANTS = {
    **dict.fromkeys(["", "~", "null", "Null", "NULL"], None),
    **dict.fromkeys(["true", "True", "TRUE"], True),
    **dict.fromkeys(["false", "False", "FALSE"], False),
    **dict.fromkeys([".nan", ".NaN", ".NAN"], float("nan")),
    **dict.fromkeys([".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"], float("inf")),
    **dict.fromkeys(["-.inf", "-.Inf", "-.INF"], float("-inf")),
}


class Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """Reads unquoted words as text; `resolve_scalar` decides their types."""

    yaml_implicit_resolvers: dict[str, Any] = {}


def read_yaml(path: Path, mistakes: Mistakes) -> Node:
    """Read a file; if that fails, add the reason to `mistakes` and raise UnreadableError."""
    display_path = shown_path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        reason = f"no such file (current folder: {Path.cwd()})."
        similar = closest(path.name, (file.name for file in path.parent.glob("*.y*ml")))
        if similar:
            reason += f" Did you mean {path.parent / similar}?"
    except OSError as problem:
        reason = f"cannot be read: {problem.strerror}"
    else:
        return read_text(data, display_path, mistakes)
    raise mistakes.unreadable(FilePosition(display_path, 1), reason)


def read_or_raise(path: Path, mistakes: Mistakes) -> Node:
    """As `read_yaml`, but raise RecipeError on failure."""
    try:
        return read_yaml(path, mistakes)
    except UnreadableError:
        mistakes.raise_if_any()
        raise


def read_text(data: bytes, display_path: str, mistakes: Mistakes) -> Node:
    """As `read_yaml`, from a file's content."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        text = f"not UTF-8 text: byte 0x{data[problem.start]:02x}. Save it as UTF-8."
        raise mistakes.unreadable(FilePosition(display_path, line), text) from None
    root = compose(text, FilePosition(display_path, 1), mistakes)
    if root is None or root.value is None:
        raise mistakes.unreadable(FilePosition(display_path, 1), "the file is empty")
    if not isinstance(root.value, dict):
        raise mistakes.unreadable(
            root.position, "expected `key: value` lines, got a list or a single value"
        )
    return root


def resolve_scalar(text: str) -> Any:
    """Read an unquoted word: only true and false are booleans, `1e-4` and `1_000` are numbers, dates stay text.

    `010` raises a ValueError: it is 8 to some readers and 10 to others.
    """
    if text in CONSTANTS:
        return CONSTANTS[text]
    if LEADING_ZERO.fullmatch(text):
        raise ValueError(
            f'`{text}` starts with 0: write {int(text.replace("_", ""))} for a number, "{text}" for text'
        )
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text) and math.isfinite(float(text)):  # 12e4567 is rather a commit's hash
        return float(text)
    if re.fullmatch(r"0x[0-9a-fA-F]+|0o[0-7]+", text):
        return int(text, 0)
    return text


def shown_path(path: Path) -> str:
    """The path for messages: relative if it is inside the current folder."""
    absolute = path.absolute()
    current = Path.cwd()
    if absolute.is_relative_to(current):
        return str(absolute.relative_to(current))
    return str(path)


def compose(text: str, start: FilePosition, mistakes: Mistakes) -> Node | None:
    """Return the tree of the only document; None for empty text.

    Args:
        start: position of the text; line 0 on the command line.
    """
    builder = TreeBuilder(start, mistakes)
    try:
        check_events(text, builder)
        documents = list(yaml.compose_all(text, Loader=Loader))
    except yaml.MarkedYAMLError as problem:
        lines = text.split("\n")
        line = line_of(problem, lines)
        reason = ", ".join(part for part in (problem.context, problem.problem) if part)
        if "\t" in lines[line]:
            reason = f"there is a tab in this line; indent with spaces ({reason})"
        raise mistakes.unreadable(builder.position(line), f"not YAML: {reason}") from None
    except yaml.reader.ReaderError as problem:  # its position counts neither lines nor characters
        line = NOT_TEXT.split(text, maxsplit=1)[0].count("\n")
        raise mistakes.unreadable(builder.position(line), f"not YAML: {problem.reason}") from None
    if len(documents) > 1:
        line = documents[1].start_mark.line
        raise mistakes.unreadable(
            builder.position(line), "a second document begins (`---`): one file is one recipe"
        )
    if documents:
        return builder.node(documents[0])
    return None


def check_events(text: str, builder: "TreeBuilder") -> None:
    """Refuse tags and deep nesting before composing, which is recursive: 100,000 brackets would crash it."""
    depth = 0
    events: Any = yaml.parse(text, Loader=Loader)
    for event in events:
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):  # `!`: quoted
            reason = f"the tag `{tag}` is not allowed: a recipe has plain values only"
            builder.mistakes.add(builder.position(event.start_mark.line), reason)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            position = builder.position(event.start_mark.line)
            raise builder.mistakes.unreadable(position, "nested too deeply")


def line_of(problem: yaml.MarkedYAMLError, lines: list[str]) -> int:
    """Return the line to report: for unclosed brackets and quotes, that where they were opened."""
    for mark in (problem.problem_mark, problem.context_mark):
        if mark is not None and any(lines[mark.line :]):
            return int(mark.line)
    return 0


class TreeBuilder:
    """Converts PyYAML's nodes to `Node`, and adds mistakes for YAML features that recipes do not support."""

    def __init__(self, start: FilePosition, mistakes: Mistakes) -> None:
        self.start = start
        self.mistakes = mistakes
        self.num_nodes = 0

    def node(self, yaml_node: yaml.Node, depth: int = 0) -> Node:
        """Convert one node recursively; each alias gets a copy."""
        position = self.position(yaml_node.start_mark.line)
        self.num_nodes += 1
        if depth > MAX_DEPTH:
            raise self.mistakes.unreadable(position, "nested too deeply")
        if self.num_nodes > MAX_NODES:
            raise self.mistakes.unreadable(position, "too large for a recipe")
        if isinstance(yaml_node, yaml.MappingNode):
            return Node(self.mapping(yaml_node, depth), position)
        if isinstance(yaml_node, yaml.SequenceNode):
            return Node([self.node(item, depth + 1) for item in yaml_node.value], position)
        is_quoted = bool(getattr(yaml_node, "style", None))
        if is_quoted:
            return Node(yaml_node.value, position)
        try:
            return Node(resolve_scalar(yaml_node.value), position)
        except ValueError as problem:
            self.mistakes.add(position, str(problem))
            return Node(yaml_node.value, position)

    def mapping(self, yaml_node: yaml.MappingNode, depth: int) -> dict[str, Node]:
        """Return the entries, each with the position of its key; keys are always text."""
        entries: dict[str, Node] = {}
        for key, value in yaml_node.value:
            position = self.position(key.start_mark.line)
            node = self.node(value, depth + 1)
            if not isinstance(key, yaml.ScalarNode):
                self.mistakes.add(position, "a key must be a single word")
            elif key.value == "<<" and not key.style:
                self.mistakes.add(position, "`<<` is not supported: name a base file with `base:`")
            elif key.value in entries:
                first = entries[key.value].position.line
                self.mistakes.add(
                    position, f"`{key.value}` is written twice, first in line {first}"
                )
            else:
                entries[key.value] = Node(node.value, position)
        return entries

    def position(self, line: int) -> FilePosition:
        """Return the position of a line of the text, counted from 0."""
        if self.start.line == 0:  # on the command line
            return self.start
        return FilePosition(self.start.file, self.start.line + line)
