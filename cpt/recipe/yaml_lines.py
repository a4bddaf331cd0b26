"""Read YAML into a tree that remembers every line, by the rules of YAML 1.2 and without PyYAML's traps."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml

from cpt.extend import closest
from cpt.recipe.tree import Mistakes, Node, Place, copied, size

MAX_DEPTH = 40
MAX_NODES = 50_000
LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader

DIGITS = r"[0-9]+(?:_[0-9]+)*"
INTEGER = re.compile(rf"[-+]?{DIGITS}")
FLOAT = re.compile(rf"[-+]?(?:\.{DIGITS}|{DIGITS}(?:\.(?:{DIGITS})?)?)(?:[eE][-+]?[0-9]+)?")
LEADING_ZERO = re.compile(r"[-+]?0[0-9_]*[0-9]")
CONSTANTS = {
    **dict.fromkeys(["", "~", "null", "Null", "NULL"], None),
    **dict.fromkeys(["true", "True", "TRUE"], True),
    **dict.fromkeys(["false", "False", "FALSE"], False),
    **dict.fromkeys([".nan", ".NaN", ".NAN"], float("nan")),
    **{sign + name: float(f"{sign}inf") for sign in ("", "+", "-") for name in (".inf", ".Inf", ".INF")},
}


class UnreadableError(Exception):
    """The file cannot be read on; the mistake is noted already."""


def read_yaml(path: Path, mistakes: Mistakes) -> Node:
    """The file's keys and values.

    Raises:
        UnreadableError: there is no tree to give; `mistakes` says why.
    """
    shown = shown_path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        there = closest(path.name, (file.name for file in path.parent.glob("*.y*ml")))
        reason = f"no such file (looked from {Path.cwd()})." + (
            f" Did you mean {path.parent / there}?" if there else ""
        )
    except IsADirectoryError:
        reason = "is a folder. Give the .yaml file."
    except OSError as problem:
        reason = f"cannot be read: {problem.strerror}"
    else:
        return read_text(data, shown, mistakes)
    mistakes.add(Place(shown, 1), reason)
    raise UnreadableError


def read_text(data: bytes, shown: str, mistakes: Mistakes) -> Node:
    """As `read_yaml`, from a file's bytes."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        mistakes.add(Place(shown, line), f"not UTF-8 text: byte 0x{data[problem.start]:02x}. Save it as UTF-8.")
        raise UnreadableError from None
    root = TreeBuilder(text, shown, mistakes).build()
    if root is None or root.value is None:
        mistakes.add(Place(shown, 1), "the file is empty: it holds no keys")
        raise UnreadableError
    if not isinstance(root.value, dict):
        mistakes.add(root.place, "expected `key: value` lines, got a list or a single value")
        raise UnreadableError
    return root


def read_value(text: str, place: Place, mistakes: Mistakes) -> Node:
    """A value as it stands on the command line."""
    node = TreeBuilder(text, place.file, mistakes, line=0).build()
    return node or Node(None, place)


def resolve_scalar(text: str) -> Any:
    """What an unquoted word means: only true and false are booleans, `1e-4` and `1_000` are numbers, dates stay text.

    Raises:
        ValueError: `010`, which is 8 to some readers and 10 to others.
    """
    if text in CONSTANTS:
        return CONSTANTS[text]
    if LEADING_ZERO.fullmatch(text):
        raise ValueError(f'`{text}` begins with 0: write {int(text.replace("_", ""))} for a number, "{text}" for text')
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text) and math.isfinite(float(text)):  # 12e4567 is a commit's hash sooner than a number
        return float(text)
    if re.fullmatch(r"0x[0-9a-fA-F]+|0o[0-7]+", text):
        return int(text, 0)
    return text


def shown_path(path: Path) -> str:
    """The path as messages show it: relative to the current folder where it lies inside."""
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(path)


class TreeBuilder:
    """Builds the tree from the parser's events: one pass, in which nothing is constructed but plain values."""

    def __init__(self, text: str, shown: str, mistakes: Mistakes, line: int | None = None) -> None:
        self.text = text
        self.shown = shown
        self.mistakes = mistakes
        self.fixed_line = line
        self.anchors: dict[str, Node | None] = {}
        self.num_nodes = 0

    def build(self) -> Node | None:
        """The tree of the one document, None when there is none."""
        try:
            self.events: Iterator[Any] = iter(yaml.parse(self.text, Loader=LOADER))
            root = None
            for event in self.events:
                if isinstance(event, yaml.DocumentStartEvent):
                    if root is not None:
                        self.fail(event, "a second document begins (`---`): one file is one recipe")
                    root = self.node(next(self.events), depth=0)
            return root
        except yaml.MarkedYAMLError as problem:
            self.mistakes.add(*self.explain(problem))
        except yaml.reader.ReaderError as problem:
            self.mistakes.add(Place(self.shown, self.line_of_first_control_character()), f"not YAML: {problem.reason}")
        raise UnreadableError

    def node(self, event: Any, depth: int) -> Node:
        """The node that begins with `event`."""
        self.num_nodes += 1
        if depth > MAX_DEPTH or self.num_nodes > MAX_NODES:
            self.fail(event, "nested too deeply" if depth > MAX_DEPTH else "too large for a recipe")
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event)
        if event.tag is not None and event.tag != "!":
            self.note(event, f"the tag `{event.tag}` is not allowed: a recipe holds plain values only")
        if event.anchor:
            self.anchors[event.anchor] = None
        place = self.place(event)
        if isinstance(event, yaml.ScalarEvent):
            node = Node(self.scalar(event), place)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = Node(list(self.items(depth)), place)
        else:
            node = Node(self.mapping(depth), place)
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def scalar(self, event: Any) -> Any:
        """The value of a single word or text; what is quoted is text."""
        if event.style or event.tag is not None:
            return event.value
        try:
            return resolve_scalar(event.value)
        except ValueError as problem:
            self.note(event, str(problem))
            return event.value

    def items(self, depth: int) -> Iterator[Node]:
        """The rest of a list."""
        for event in self.events:
            if isinstance(event, yaml.SequenceEndEvent):
                return
            yield self.node(event, depth + 1)

    def mapping(self, depth: int) -> dict[str, Node]:
        """The rest of a mapping; a key is its text, whatever it looks like."""
        entries: dict[str, Node] = {}
        for event in self.events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            if not isinstance(event, yaml.ScalarEvent):
                self.fail(event, "a key must be a single word")
            value = self.node(next(self.events), depth + 1)
            if event.value == "<<" and not event.style:
                self.note(event, "`<<` is not supported: name a file to build on with `base:`")
            elif event.value in entries:
                self.note(event, f"`{event.value}` is written twice, first in line {entries[event.value].place.line}")
            else:
                entries[event.value] = Node(value.value, self.place(event))
        return entries

    def alias(self, event: Any) -> Node:
        """What an anchor stands for."""
        target = self.anchors.get(event.anchor)
        if target is None:
            self.fail(event, f"`*{event.anchor}` has no anchor `&{event.anchor}` before it")
        self.num_nodes += size(target)
        return copied(target)

    def place(self, event: Any) -> Place:
        """Where the event begins."""
        return Place(self.shown, self.line_of(event.start_mark))

    def line_of(self, mark: Any) -> int:
        """The line as editors count it."""
        return self.fixed_line if self.fixed_line is not None else (mark.line + 1 if mark else 1)

    def note(self, event: Any, text: str) -> None:
        """A mistake that reading can go on after."""
        self.mistakes.add(self.place(event), text)

    def fail(self, event: Any, text: str) -> NoReturn:
        """A mistake that ends the reading."""
        self.note(event, text)
        raise UnreadableError

    def line_of_first_control_character(self) -> int:
        """The line of what YAML does not allow in a text; the parser gives no usable position."""
        before = re.split(
            r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", self.text, maxsplit=1
        )[0]
        return before.count("\n") + 1 if self.fixed_line is None else self.fixed_line

    def explain(self, problem: yaml.MarkedYAMLError) -> tuple[Place, str]:
        """The parser's complaint with the usual reason; what is never closed is shown where it was opened."""
        lines = self.text.split("\n")
        marks = [
            mark
            for mark in (problem.problem_mark, problem.context_mark)
            if mark is not None and any(lines[mark.line :])
        ]
        number = marks[0].line if marks else 0
        said = ", ".join(part for part in (problem.context, problem.problem) if part)
        reason = "there is a tab in this line; indent with spaces" if "\t" in lines[number] else ""
        return Place(
            self.shown, number + 1 if self.fixed_line is None else 0
        ), f"not YAML: {f'{reason} ({said})' if reason else said}"
