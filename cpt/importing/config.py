"""Read a config of another tool as that tool does, and tell which of the two it is."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cpt.errors import RecipeError

MAX_BYTES = 200_000
MAX_VALUES = 10_000
MAX_DEPTH = 12
OURS = {"model", "data", "budget", "base"}
"""Sections of a recipe; neither tool has a key that is called so."""
V1 = {"train_dataset", "peft_config", "dist_config", "kernel_config", "model_class", "sample_backend"}
"""Keys of LLaMA-Factory's v1, beside `model`."""


@dataclass(frozen=True)
class Config:
    """What another tool's file says."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]
    """Where each key stands."""


def read_config(path: Path) -> Config:
    """The keys of a YAML file, by YAML 1.1 as PyYAML reads it for both tools: `no` is false, `1e-5` a text.

    Raises:
        RecipeError: it is no such file, with the line where that shows.
    """
    text = read_text(path)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        values: Any = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark else 1
        raise RecipeError(f"{path}:{line}: not YAML: {problem.problem}") from problem
    except yaml.reader.ReaderError as problem:
        line = text.count("\n", 0, problem.position) + 1
        raise RecipeError(f"{path}:{line}: not YAML: {first_line(problem)}") from problem
    except (yaml.YAMLError, ValueError) as problem:
        raise RecipeError(f"{path}: not YAML: {first_line(problem)}") from problem
    except RecursionError as problem:
        raise RecipeError(f"{path}: nested too deeply for a config") from problem
    if values is None:
        raise RecipeError(f"{path}: the file is empty: it holds no keys")
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        raise RecipeError(
            f"{path}: expected `key: value` lines, got {'a list' if isinstance(values, list) else 'a single value'}"
        )
    if count(values, 0) > MAX_VALUES:
        raise RecipeError(f"{path}: too large for a config")
    lines = lines_of(node, path)
    if len(OURS & values.keys()) > 1:
        raise RecipeError(f"{path} is a recipe of cpt already. Check it: cpt check {path}")
    return Config(path, with_text_keys(values), lines)


def read_text(path: Path) -> str:
    """What stands in the file."""
    try:
        if path.is_dir():
            raise RecipeError(f"{path} is a folder. Give the .yml or .yaml file.")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError as problem:
        raise RecipeError(f"{path}: no such file (looked from {Path.cwd()}).") from problem
    except OSError as problem:
        raise RecipeError(f"{path}: cannot be read: {problem.strerror}.") from problem
    if len(data) > MAX_BYTES:
        raise RecipeError(f"{path}: more than {MAX_BYTES:,} bytes: too large for a config")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise RecipeError(
            f"{path}:{line}: not UTF-8 text: byte 0x{data[problem.start]:02x}. Save it as UTF-8."
        ) from problem


def lines_of(root: yaml.MappingNode, path: Path) -> dict[str, int]:
    """The line of each key; one that is written twice, here or below, is refused, since only its last value counts."""
    lines: dict[str, int] = {}
    for key, value in root.value:
        line, name = key.start_mark.line + 1, str(key.value)
        if name in lines:
            raise RecipeError(
                f"{path}:{line}: `{name}` is written twice, first in line {lines[name]}: only the last one counts"
            )
        lines[name] = line
        for child in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if isinstance(child, yaml.MappingNode):
                lines_of(child, path)
    return lines


def with_text_keys(value: Any) -> Any:
    """The same with texts for keys, also those that YAML takes for numbers or switches."""
    if isinstance(value, dict):
        return {str(key): with_text_keys(child) for key, child in value.items()}
    return [with_text_keys(child) for child in value] if isinstance(value, list) else value


def count(value: object, depth: int) -> int:
    """Number of values, those that an anchor repeats each time."""
    if depth > MAX_DEPTH:
        return MAX_VALUES + 1
    total = 1
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        total += count(child, depth + 1)
        if total > MAX_VALUES:
            break
    return total


def kind_of(config: Config, known: Mapping[str, Collection[str]], needed: Mapping[str, str]) -> str:
    """The tool whose config this is: by what it calls the model, else by the keys that only it has.

    Args:
        known: the keys of each tool.
        needed: the key of each tool without which it does nothing.

    Raises:
        RecipeError: of neither, or of both.
    """
    named = [tool for tool, key in needed.items() if key in config.values]
    if (
        len(named) == 1
    ):  # the tools borrow keys from each other and from the Trainer: `torch_dtype`, `trackio_space_id`
        return named[0]
    if "model" in config.values and not V1.isdisjoint(config.values):
        raise RecipeError(
            f"{config.path} is of LLaMA-Factory's v1, whose keys are others: give the config of its main version"
        )
    own = {
        tool: sorted(key for key in config.values if key in keys and not in_others(key, tool, known))
        for tool, keys in known.items()
    }
    found = [tool for tool, keys in own.items() if keys]
    if not found:
        keys = ", ".join(config.values)[:200]
        raise RecipeError(
            f"{config.path}: these are keys of neither {' nor '.join(known)}: {keys}. Say whose they are: --from TOOL"
        )
    if len(found) > 1:
        told = "; ".join(f"{', '.join(own[tool][:3])} ({tool})" for tool in found)
        raise RecipeError(
            f"{config.path} mixes keys of two tools: {told}. Say which of them reads it: --from {found[0]} or"
            f" {found[1]}"
        )
    return found[0]


def in_others(key: str, tool: str, known: Mapping[str, Collection[str]]) -> bool:
    """Whether another tool has the key too."""
    return any(key in keys for other, keys in known.items() if other != tool)


def first_line(problem: BaseException) -> str:
    """The first line of an error's message."""
    return (str(problem).splitlines() or [type(problem).__name__])[0]
