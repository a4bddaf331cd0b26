"""Read all of a page without running it: every block told, every command known, every recipe loaded, every program's
names there."""

import ast
import importlib
import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from cpt.errors import CptError
from documented.blocks import Block, PageError, needs_of, read_blocks, read_inline_code, typed
from documented.commands import ROOT, Reading, check_script, outputs_of
from documented.recipes import check_yaml

IN_TEXT = ("cpt ", "make ", "python -m benchmarks")


def complaints_about(page: Path, folder: Path) -> list[str]:
    """All that is wrong with the page.

    Args:
        folder: one as `make_folder` makes it.
    """
    try:
        blocks = read_blocks(page)
        written = frozenset(
            path for block in blocks if block.is_commands for step in typed(block) for path in outputs_of(step.command)
        )
    except PageError as problem:
        return [str(problem)]
    found = []
    for block in blocks:
        found += complaint(
            lambda block=block: check_block(block, Reading(folder, is_run=block.is_run, written=written))
        )
    for line, code in read_inline_code(page):
        if code.startswith(IN_TEXT):
            reading = Reading(folder, in_text=True, written=written)
            found += complaint(
                lambda place=f"{page.name}:{line}", code=code, reading=reading: check_inline(place, code, reading)
            )
    return found


def complaint(check: Callable[[], None]) -> list[str]:
    """What the check says."""
    try:
        check()
    except PageError as problem:
        return [str(problem)]
    return []


def check_block(block: Block, reading: Reading) -> None:
    """A block by itself.

    Raises:
        PageError: what is wrong with it.
    """
    try:
        if block.is_commands:
            for step in typed(block):
                check_script(step.command, reading)
        elif block.language == "yaml":
            check_yaml(block, reading.folder, ROOT)
        elif block.language == "python":
            check_program(block)
        elif block.language in ("json", "jsonl", "toml"):
            READERS[block.language](block.text)
    except (PageError, CptError, ValueError) as problem:
        told = str(problem)
        raise PageError(told if told.startswith(block.place) else f"{block.place}: {told}") from problem


def check_inline(place: str, code: str, reading: Reading) -> None:
    """A command in the text; parts of it may be left out."""
    try:
        check_script(code, reading)
    except PageError as problem:
        raise PageError(f"{place}: {problem}") from problem


def check_program(block: Block) -> None:
    """It is Python; where it is not run, what it takes from cpt is there."""
    try:
        tree = ast.parse(block.text)
    except SyntaxError as problem:
        raise PageError(f"{block.place}: {problem}") from problem
    for node in ast.walk(tree) if needs_of(block) or "file" in block.settings else ():
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "cpt":
            check_names_of(str(node.module), [alias.name for alias in node.names])


def check_names_of(module: str, names: list[str]) -> None:
    """The module has them."""
    try:
        there = vars(importlib.import_module(module))
    except ModuleNotFoundError as problem:
        raise PageError(str(problem)) from problem
    for name in names:
        if name not in there and f"{module}.{name}" not in sys.modules:
            raise PageError(f"{module} has no {name}")


def read_json_lines(text: str) -> None:
    """Each line for itself."""
    for line in text.splitlines():
        json.loads(line)


READERS: dict[str, Callable[[str], object]] = {"json": json.loads, "jsonl": read_json_lines, "toml": tomllib.loads}
