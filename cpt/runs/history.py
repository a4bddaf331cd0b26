"""The history of a run's recipe: history.jsonl has a line for each change, with the recipe and the data until it.

A line: `step` (the last one with the old recipe), `row` (the first one with the new recipe), `changes` (key, kind,
before, after), `note`, `recipe` (until this step), `new_stretch` (whether the mixture changed), `positions` (rows read
of each source so far), `fingerprint` and `inputs` (of the data until this row), `from` (the checkpoint of another run
that this run began from), `replay` (written by `cpt reproduce`: free changes are repeated too).

record.json has the same recipe and history with a hash. recipe.yaml and history.jsonl are for readers, and are made
again from it. Each checkpoint has a copy, with the run's inputs and what it learned, from which lost files are
restored.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from cpt.errors import CheckpointError, RecipeError
from cpt.files import (
    DAMAGED,
    intact_content,
    read_sealed,
    report_damage,
    sealed,
    write_atomic,
)
from cpt.recipe.load import class_of_change, dump_recipe, saved_recipe
from cpt.recipe.schema import Recipe
from cpt.runs.events import record_event
from cpt.runs.folder import (
    BEGAN,
    HISTORY,
    INPUTS,
    LEARNED,
    RECIPE,
    RECORD,
    Content,
    read_lines,
    read_object,
)

FREE_SECTIONS = [name for name, field in Recipe.model_fields.items() if "free" in field.metadata]
CHECKPOINT = re.compile(r"(?:bad-)?checkpoint-(\d+)(?:-\d+)?")
KEYS_LEARNED = {"micro_batch", "rollback", "fallbacks", "first_batch"}


@dataclass(frozen=True)
class Part:
    """A part of a run with one recipe, until the step of the next change."""

    recipe: Recipe
    end: int | None = None
    """None: the end of the run."""
    stretches: list[Content] = field(default_factory=list)
    """The lines with which a stretch of the data ended before, each stretch with at least one row."""


def read_history(folder: Path) -> list[Content]:
    return read_lines(folder / HISTORY)


def write_history(folder: Path, lines: Sequence[Content]) -> None:
    write_atomic(folder / HISTORY, history_text(lines), durable=True, reuse_space=True)


def history_text(lines: Sequence[Content]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def part_after(lines: Sequence[Content], step: int, current: Recipe) -> Part:
    """Return the part of the run after a step; `current` is the recipe after all changes.

    A run that resumes before a change repeats the steps up to it as they were. Keys that may change freely have the
    current values, except where `cpt reproduce` repeats them.
    """
    stretches: list[Content] = []
    last_row = 0
    for line in lines:
        if line["step"] <= step:
            if line["new_stretch"] and line["row"] > last_row:
                stretches.append(line)
                last_row = line["row"]
            continue
        recipe = Recipe.model_validate(line["recipe"])
        if line.get("replay"):
            return Part(recipe, line["step"], stretches)
        if any(change["kind"] != "free" for change in line["changes"]):
            return Part(with_free_keys(recipe, current), line["step"], stretches)
    return Part(current, None, stretches)


def with_free_keys(recipe: Recipe, current: Recipe) -> Recipe:
    """Return the recipe with the free sections, and the free keys of `training:`, of the current one."""
    training = {key: value for key, value in recipe.training.items() if not is_free(key)}
    training |= {key: value for key, value in current.training.items() if is_free(key)}
    sections = {name: getattr(current, name) for name in FREE_SECTIONS}
    return recipe.model_copy(update=sections | {"training": training})


def is_free(key: str) -> bool:
    return class_of_change(f"training.{key}") == "free"


# --- the record: recipe, history, inputs and what was learned -----------------------------------------


@dataclass(frozen=True)
class RecipeRecord:
    recipe: Recipe
    """The current recipe."""
    history: list[Content]


def read_record(folder: Path) -> RecipeRecord | None:
    """The recipe and history of a run; None if there is no readable recipe.

    Without an intact record.json they are in recipe.yaml and history.jsonl, or in the newest checkpoint if these two
    contradict it.
    """
    content = intact_content(folder / RECORD)
    if content is not None:
        return record_of(content, folder / RECORD)
    readable = readable_record(folder)
    copy = next(checkpoint_copies(folder), None)
    if copy is None:
        return readable
    saved = record_of(copy, folder)
    if readable is not None and continues(readable, saved):
        return readable
    return saved


def record_of(content: Content, path: Path) -> RecipeRecord:
    try:
        recipe = Recipe.model_validate(content["recipe"])
        for line in content["history"]:
            Recipe.model_validate(line["recipe"])
    except ValidationError as problem:
        raise CheckpointError(
            f"{path}: the recipe of the run cannot be read by this version of cpt:"
            f" {problem.errors()[0]['msg']}. Use the version that wrote it, or start another run: name=..."
        ) from problem
    return RecipeRecord(recipe, content["history"])


def readable_record(folder: Path) -> RecipeRecord | None:
    """The record in recipe.yaml and history.jsonl, which have no hash; None if one of them cannot be read."""
    if not (folder / RECIPE).exists():
        return None
    try:
        recipe = saved_recipe(folder)
        history = read_history(folder)
        return record_of({"recipe": recipe, "history": history}, folder / HISTORY)
    except (RecipeError, CheckpointError, KeyError):
        return None


def continues(record: RecipeRecord, saved: RecipeRecord) -> bool:
    """Whether a record may be that of a later time: each change adds a line."""
    if not all(line in record.history for line in saved.history):
        return False
    return len(record.history) > len(saved.history) or are_equal(record, saved)


def are_equal(first: RecipeRecord, second: RecipeRecord) -> bool:
    if first.history != second.history:
        return False
    return dump_recipe(first.recipe) == dump_recipe(second.recipe)


def checkpoint_copies(folder: Path) -> Iterator[Content]:
    """The intact records in the run's checkpoints, newest first, also of those with other damaged files."""
    checkpoints: list[tuple[int, Path]] = []
    for path in folder.glob("*checkpoint-*"):
        match = CHECKPOINT.fullmatch(path.name)
        if match:
            checkpoints.append((int(match[1]), path))
    for _, path in sorted(checkpoints, reverse=True):
        content = intact_content(path / RECORD)
        if content is not None and "recipe" in content:
            yield content


def write_record(folder: Path, record: RecipeRecord) -> None:
    """Write record.json, and the files made from it."""
    content = {
        "recipe": record.recipe.model_dump(mode="json", by_alias=True),
        "history": record.history,
        "began": read_object(folder / BEGAN),
    }
    write_atomic(folder / RECORD, sealed(content) + "\n", durable=True, reuse_space=True)
    if record.history or (folder / HISTORY).exists():
        write_history(folder, record.history)
    write_atomic(folder / RECIPE, dump_recipe(record.recipe), reuse_space=True)


def restore_record(folder: Path) -> None:
    """Make damaged or lost files of the record again, each with an event; the run's lock is held."""
    copy = next(checkpoint_copies(folder), {})
    content = intact_content(folder / RECORD)
    began = (content or {}).get("began") or copy.get("began")
    learned = copy.get("learned")
    if began and not read_object(folder / BEGAN):
        put_again(folder / BEGAN, json.dumps(began))
    if learned and not read_learned(folder):
        put_again(folder / LEARNED, sealed(learned, indent=2) + "\n")
    record = read_record(folder)
    if record is None:
        return
    readable = readable_record(folder)
    if readable is None or not are_equal(readable, record):
        for name, text in texts_of(record).items():
            if text_of(folder / name) != text:
                put_again(folder / name, text)
    if content is None:
        write_record(folder, record)


def texts_of(record: RecipeRecord) -> dict[str, str]:
    return {RECIPE: dump_recipe(record.recipe), HISTORY: history_text(record.history)}


def put_again(path: Path, text: str) -> None:
    write_atomic(path, text, durable=True, reuse_space=True)
    message = f"{path} was damaged, lost or edited, and was written again from the run's record."
    record_event(path.parent, DAMAGED, message)


def text_of(path: Path) -> str:
    """Empty if it is missing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def copy_of_record(folder: Path) -> str:
    """The text of a checkpoint's record.json."""
    content = {
        **(intact_content(folder / RECORD) or {}),
        "began": read_object(folder / BEGAN),
        "inputs": read_sealed(folder / INPUTS) or {},
        "learned": read_learned(folder),
    }
    return sealed(content) + "\n"


def read_learned(folder: Path) -> Content:
    """The facts that earlier starts of the run recorded; empty if the file is missing or damaged."""
    path = folder / LEARNED
    content = intact_content(path)
    if content is not None:
        return content
    older = read_object(path)  # of a version without a hash in this file
    if path.exists() and not older.keys() <= KEYS_LEARNED:
        report_damage(path)
        return {}
    return older


def recorded_inputs(folder: Path, checkpoint: Path | None) -> Content:
    """The run's inputs in inputs.json, or else in the checkpoint to resume from."""
    inputs = read_sealed(folder / INPUTS)
    if inputs is None and checkpoint is not None:
        inputs = (intact_content(checkpoint / RECORD) or {}).get("inputs")
    return inputs or {}
