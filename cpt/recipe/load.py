"""Load a recipe from YAML, or raise one RecipeError that lists every mistake with its file and line."""

import json
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from cpt.errors import RecipeError
from cpt.files import SHIPPED_FILES
from cpt.recipe.keys import child_annotation, is_free_mapping, item_in, keys_of, section_in
from cpt.recipe.paths import RECIPE, STATUS, expanded, result_of_run
from cpt.recipe.rules import check_rules, name_of_path
from cpt.recipe.schema import (
    CLASSES_OF_CHANGE,
    LORA_PRESETS,
    RETAIN_PRESETS,
    Component,
    Evaluation,
    Model,
    Recipe,
    Source,
)
from cpt.recipe.shape import check_passed_on_keys, check_shape, read_option_numbers
from cpt.recipe.training_keys import NESTED, accepted_keys, had_no_effect, is_refused
from cpt.recipe.tree import (
    FilePosition,
    Location,
    Mistakes,
    Node,
    UnreadableError,
    compose,
    dotted,
    holds_broken,
    merged,
    node_at,
    plain,
    read_or_raise,
    read_text,
    read_yaml,
    shown_path,
    steps_of,
)
from cpt.recipe.values import in_yaml, write_yaml

log = logging.getLogger("cpt")


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, lora: bool = False) -> Recipe:
    """Read a recipe.

    Args:
        overrides: `key.path=value`, applied after the file.
        lora: add `model.lora` with its defaults, unless the recipe has it.

    Raises:
        RecipeError: all mistakes, one per line, as `file:line: what is wrong`.
        ResourceError: the keys of the installed transformers or peft cannot be read.
    """
    return load_with_tree(path, overrides, lora=lora)[0]


def saved_recipe(run: Path) -> Recipe:
    """Return the recipe in a run's folder, parsed once unless its file changes; raises as `load_recipe`."""
    path = run / RECIPE
    if not path.is_file():
        return load_recipe(path)
    state = path.stat()
    return parse_saved(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=16)
def parse_saved(path: Path, modified_ns: int, num_bytes: int) -> Recipe:
    return load_recipe(path)


def load_with_tree(
    path: str | Path, overrides: Sequence[str] = (), *, lora: bool = False
) -> tuple[Recipe, Node]:
    """Return the recipe, and its tree: `tree.position_of(root, ("data", "sources", 0))` is its file and line."""
    path = Path(path)
    mistakes = Mistakes()
    root = read_or_raise(path, mistakes)
    refuse_other_files(root, path)
    root = resolve_references(root, Recipe, mistakes, trail=(path.resolve(),))
    root = apply_overrides(root, overrides, mistakes)
    if lora:
        add_lora(root)
    drop_former_keys(root, path)
    return check_tree(root, mistakes), root


KEYS_OF_OTHER_FILES = {"steps", "base_model", "model_name_or_path", "dataset", "train_dataset"}
KEYS_OF_RECIPES = {"data", "budget", "base"}


def refuse_other_files(root: Node, path: Path) -> None:
    keys = root.value.keys()
    if keys & KEYS_OF_OTHER_FILES and not keys & KEYS_OF_RECIPES:
        raise RecipeError(
            f"{path} is not a recipe. Check a pipeline: cpt pipeline {path} --dry-run. Translate a config of"
            f" axolotl, LLaMA-Factory or ms-swift: cpt import {path} --output my_recipe.yaml"
        )


def add_lora(root: Node) -> None:
    """Add `model.lora` with its defaults, unless the recipe has it."""
    model = root.value.get("model")
    if model is None or not isinstance(model.value, dict):
        return
    options = model.value.get("lora")
    if options is None or options.value is None:
        model.value["lora"] = Node({}, FilePosition("on the command line: `--lora`", 0))


def drop_former_keys(root: Node, path: Path) -> None:
    """Warn of keys that are refused today, but had no effect when an earlier version began this run; drop them."""
    training = node_at(root, ("training",))
    saved_recipe = recipe_of_run(root, path)
    saved_training = saved_recipe.get("training")
    if training is None or not isinstance(training.value, dict):
        return
    if not isinstance(saved_training, dict):
        return
    stage = str(saved_recipe.get("stage", "cpt"))
    dropped = drop_unchanged_keys(training, saved_training, stage)
    if dropped:
        warn_of_former_keys(", ".join(dropped), str(plain(root).get("name")))


@cache
def warn_of_former_keys(keys: str, run: str) -> None:
    """Warn once in a process: the run's own files are read many times."""
    log.warning(
        f"{keys} had no effect in the run {run}, which an earlier version began, and is left out. Remove it from the"
        " recipe."
    )


def recipe_of_run(root: Node, path: Path) -> dict[str, Any]:
    """Return the recipe that the run's folder has, as it was written; empty if there is no run yet."""
    folder = path.parent
    is_saved_recipe = path.name == RECIPE and (folder / STATUS).is_file()
    if not is_saved_recipe:
        name = node_at(root, ("name",))
        output_dir = node_at(root, ("output_dir",))
        default = keys_of(Recipe)["output_dir"].get_default()
        folder = Path(str(output_dir.value if output_dir else default)).expanduser()
        folder = folder / str(name.value if name else "")
    try:
        content = plain(read_yaml(folder / RECIPE, Mistakes()))
    except (UnreadableError, OSError):
        return {}
    if isinstance(content, dict):
        return content
    return {}


def drop_unchanged_keys(
    section: Node, saved: Mapping[str, Any], stage: str, above: str = ""
) -> list[str]:
    """Drop the refused keys that have the saved value; return them."""
    dropped = list[str]()
    for name, node in list(section.value.items()):
        key = f"{above}{name}"
        value = plain(node)
        saved_value = saved.get(name, ...)
        if key in NESTED and isinstance(value, dict) and isinstance(saved_value, dict):
            dropped += drop_unchanged_keys(node, saved_value, stage, f"{key}.")
            if not node.value:
                del section.value[name]
        elif value == saved_value and is_refused(key, value, stage) and had_no_effect(key, saved):
            del section.value[name]
            dropped.append(f"`training.{key}`")
    return dropped


def load_section(
    path: str | Path, key: Literal["data", "model"], overrides: Sequence[str] = ()
) -> Recipe:
    """Load a recipe, or a mixture's or a model's file, which contains only this section; the others are then
    placeholders. Overrides are `data.key=value`."""
    mistakes = Mistakes()
    root = read_or_raise(Path(path), mistakes)
    if root.value.keys() & keys_of(Recipe).keys():
        return load_recipe(path, overrides)
    required = {
        "model": {"path": "none"},
        "data": {"sources": [{"path": "none"}]},
        "budget": {"epochs": 1},
    }
    placeholder = {"name": key, "stage": "pretrain", **required, key: str(Path(path).resolve())}
    root = read_text(json.dumps(placeholder).encode(), str(path), mistakes)
    root = resolve_references(root, Recipe, mistakes, trail=())
    root = apply_overrides(root, overrides, mistakes)
    written_sections = ("data", "evaluation") if key == "data" else ("model",)
    return check_tree(root, mistakes, written_sections)


def check_tree(root: Node, mistakes: Mistakes, sections: Collection[str] | None = None) -> Recipe:
    """Return the recipe of a tree, or raise one error with all mistakes.

    Args:
        sections: those in which rules are checked; by default all.
    """
    expand_paths(root, mistakes)
    check_passed_on_keys(root, mistakes)
    add_retain_presets(root, mistakes)
    find_deepspeed_config(root, mistakes)
    read_option_numbers(root, mistakes)
    values = plain(root)
    recipe, faulty = check_shape(root, values, mistakes)
    for key, child in root.value.items():
        if holds_broken(child):
            faulty.add(key)
    if not root.broken:
        # Rules between sections without mistakes are checked now, so that one error has all mistakes.
        valid_sections: dict[str, Any] = {}
        for key, field in keys_of(Recipe).items():
            if key in faulty or (sections is not None and key not in sections):
                continue
            if key in values:
                adapter: TypeAdapter[Any] = TypeAdapter(field.annotation or Any)
                valid_sections[key] = adapter.validate_python(values[key])
            else:
                valid_sections[key] = field.get_default()
        check_rules(valid_sections, root, mistakes)
    mistakes.raise_if_any()
    assert recipe is not None, "a recipe without mistakes has a shape"
    model = recipe.model.model_copy(update={"path": result_of_run(recipe.model.path)})
    tokenizer = recipe.tokenizer.model_copy(update={"path": result_of_run(recipe.tokenizer.path)})
    return recipe.model_copy(update={"model": model, "tokenizer": tokenizer})


def add_retain_presets(root: Node, mistakes: Mistakes) -> None:
    """Add the held-out sets and tasks that the words of `evaluation.retain` mean to `evaluation.perplexity` and
    `.tasks`. A word that is the name of a source or held-out set means that set, so a saved recipe is loaded as an
    equal one."""
    retain = node_at(root, ("evaluation", "retain"))
    if retain is None or not isinstance(retain.value, dict):
        return
    names = names_of_sources(root)
    evaluation = root.value["evaluation"].value
    for word in RETAIN_PRESETS:
        if word not in retain.value or word in names:
            continue
        preset = read_yaml(RETAIN_FILES / f"{word}.yaml", mistakes)
        for key, additions in preset.value.items():
            entries = evaluation.get(key, Node([], retain.position))
            if isinstance(entries.value, list):  # otherwise a mistake, which is reported later
                evaluation[key] = with_new_names(entries, additions)
            if key == "tasks" and retain.value.pop(word).value is not None:
                text = "must be null: tasks are evaluated after the run, so a score cannot stop it"
                mistakes.add(retain.position, f"`evaluation.retain.{word}`: {text}")


def names_of_sources(root: Node) -> set[str]:
    """The names, in reports, of the sources and held-out sets in the tree, which is not checked yet."""
    names: set[str] = set()
    for location in (("data", "sources"), ("evaluation", "perplexity")):
        entries = node_at(root, location)
        if entries is None or not isinstance(entries.value, list):
            continue
        for entry in plain(entries):
            if isinstance(entry, dict):
                names.add(str(entry.get("name") or name_of_path(str(entry.get("path")))))
    return names


def with_new_names(entries: Node, additions: Node) -> Node:
    """Return a list with those sections of another list whose names it does not have."""
    names = [entry.get("name") for entry in plain(entries) if isinstance(entry, dict)]
    new = [entry for entry in additions.value if entry.value["name"].value not in names]
    return replace(entries, value=[*entries.value, *new])


def find_deepspeed_config(root: Node, mistakes: Mistakes) -> None:
    """Write the path of DeepSpeed's config relative to the current folder; JSON stays as it is."""
    deepspeed = node_at(root, ("training", "deepspeed"))
    if deepspeed is None or not isinstance(deepspeed.value, str):
        return
    if not deepspeed.value.lstrip().startswith("{"):
        path = find_file(deepspeed, mistakes)
        if path is not None:
            deepspeed.value = shown_path(path)


def dump_recipe(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML that `load_recipe` reads back as an equal recipe: every key in the schema's
    order, including defaults."""
    return write_yaml(recipe.model_dump(mode="json", by_alias=True))


RETAIN_FILES = SHIPPED_FILES / "recipes" / "presets" / "retain"
REPOSITORY = SHIPPED_FILES  # in an installed package, the files that recipes refer to


def resolve_references(
    node: Node, annotation: Any, mistakes: Mistakes, trail: tuple[Path, ...]
) -> Node:
    """Replace every reference below `node` by the content of its file.

    Args:
        annotation: the type that the schema has for the node.
        trail: the files that were read to reach the node, to detect circular references.
    """
    value = node.value
    if annotation == Evaluation.model_fields["retain"].annotation:
        is_word = isinstance(value, str) and not is_yaml_file(value)
        if is_word or isinstance(value, list):
            return expand_retain_words(node)
    if isinstance(value, list) and item_in(annotation) is not None:
        items = [resolve_references(item, item_in(annotation), mistakes, trail) for item in value]
        return replace(node, value=items)
    is_section = section_in(annotation) is not None or is_free_mapping(annotation)
    if is_section and isinstance(value, str):
        return resolve_word(node, annotation, mistakes, trail)
    if is_section and isinstance(value, dict):
        return resolve_section(node, annotation, mistakes, trail)
    return node


def is_yaml_file(value: str) -> bool:
    return value.endswith((".yaml", ".yml"))


def expand_retain_words(retain: Node) -> Node:
    """Write `general`, short for `{general: null}`, and lists of such words as one section."""
    limits: dict[str, Node] = {}
    entries = [retain]
    if isinstance(retain.value, list):
        entries = retain.value
    for entry in entries:
        if isinstance(entry.value, dict):
            limits |= entry.value
        else:
            limits[str(plain(entry))] = Node(None, entry.position)
    return Node(limits, retain.position, retain.own_file)


def resolve_word(node: Node, annotation: Any, mistakes: Mistakes, trail: tuple[Path, ...]) -> Node:
    """Return the section that a word means: a preset of LoRA, a file, or a component's name."""
    word = node.value
    if word in LORA_PRESETS and annotation == Model.model_fields["lora"].annotation:
        return Node({"preset": Node(word, node.position)}, node.position, node.own_file)
    if is_yaml_file(word):
        base = read_base(node, annotation, mistakes, trail)
        return Node(base.value, node.position, own_file=True, broken=base.broken)
    section = section_in(annotation)
    if section is not None and issubclass(section, Component):
        return Node({"name": Node(word, node.position)}, node.position, node.own_file)
    text = f'expected keys and values or the path of a .yaml file, got the text "{word}"'
    mistakes.add(node.position, text)
    return Node({}, node.position, own_file=True, broken=True)


def resolve_section(
    node: Node, annotation: Any, mistakes: Mistakes, trail: tuple[Path, ...]
) -> Node:
    """Resolve the references in a section, and merge it into the file that its key `base` names."""
    entries: dict[str, Node] = {}
    for key, child in node.value.items():
        if key != "base":
            key_annotation = child_annotation(annotation, key)
            entries[key] = resolve_references(child, key_annotation, mistakes, trail)
    section = replace(node, value=entries)
    reference = node.value.get("base")
    if reference is None:
        return section
    if not isinstance(reference.value, str) or not is_yaml_file(reference.value):
        mistakes.add(reference.position, "`base` must be the path of a .yaml file")
        return Node(entries, node.position, own_file=True, broken=True)
    merged_section = merged(section, read_base(reference, annotation, mistakes, trail))
    return replace(merged_section, position=node.position, own_file=True)


def read_base(
    reference: Node, annotation: Any, mistakes: Mistakes, trail: tuple[Path, ...]
) -> Node:
    """Return the section in the file that `reference` names, with its references resolved."""
    broken = Node({}, reference.position, broken=True)
    path = find_file(reference, mistakes)
    if path is None:
        return broken
    absolute = path.resolve()
    if absolute in trail:
        circle = [*trail[trail.index(absolute) :], absolute]
        text = f"circular reference: {' -> '.join(map(shown_path, circle))}"
        mistakes.add(reference.position, text)
        return broken
    try:
        section = read_yaml(path, mistakes)
    except UnreadableError:
        return broken
    return resolve_references(section, annotation, mistakes, (*trail, absolute))


# Keys of paths, also in the options of filters, tasks and Hugging Face's sections.
PATH_KEYS = frozenset(
    [
        "path",
        "output_dir",
        "archive",
        "folder",
        "against",
        "index",
        "data_files",
        "deepspeed",
        "logging_dir",
        "cache_dir",
    ]
)


def expand_paths(node: Node, mistakes: Mistakes, key: str = "") -> None:
    """Replace `~` and `$VARIABLE` in all paths, once for all readers of the recipe."""
    if isinstance(node.value, dict):
        for name, child in node.value.items():
            expand_paths(child, mistakes, str(name))
    elif isinstance(node.value, list):
        for child in node.value:
            expand_paths(child, mistakes, key)
    elif isinstance(node.value, str) and (key in PATH_KEYS or node.value.startswith("~/")):
        try:
            node.value = expanded(node.value)
        except ValueError as problem:
            mistakes.add(node.position, f"`{key}`: {problem}")


def find_file(reference: Node, mistakes: Mistakes) -> Path | None:
    """Find the file that a path in a recipe names: in the folder of the recipe, in the current folder, or among the
    recipes that come with cpt. If there is no such file, add a mistake and return None."""
    position = reference.position
    is_on_command_line = position.line == 0
    recipe_folder = Path() if is_on_command_line else Path(position.file).parent
    folders = [recipe_folder, Path(), REPOSITORY / "recipes", REPOSITORY]
    try:
        path = Path(expanded(reference.value))
    except ValueError as problem:
        mistakes.add(position, str(problem))
        return None
    for folder in folders:
        if (folder / path).is_file():
            return Path(os.path.normpath(folder / path))
    text = f"no such file: {reference.value}"
    if not path.is_absolute():
        searched = dict.fromkeys(str(folder.resolve()) for folder in folders)
        text += f" (searched: {', '.join(searched)})"
    mistakes.add(position, text)
    return None


def apply_overrides(root: Node, overrides: Sequence[str], mistakes: Mistakes) -> Node:
    """Apply the overrides to the tree; later ones win."""
    for override in overrides:
        position = FilePosition(f"on the command line: `{override}`", 0)
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            mistakes.add(position, "expected `key.path=value`")
            continue
        with suppress(UnreadableError):
            value = compose(text, position, mistakes) or Node(None, position)
            problem = set_value(root, steps_of(key.strip()), value)
            if problem:
                mistakes.add(position, problem)
            root = resolve_references(root, Recipe, mistakes, trail=())
    return root


def set_value(root: Node, steps: Location, value: Node) -> str | None:
    """Set a value, creating sections as needed; return the reason if that is impossible."""
    node = root
    for number, step in enumerate(steps):
        is_last = number == len(steps) - 1
        above = dotted(steps[:number])
        if isinstance(node.value, list):
            if not isinstance(step, int) or step >= len(node.value):
                entries = "entry" if len(node.value) == 1 else "entries"
                return (
                    f"`{above}` has {len(node.value)} {entries}, counted from 0:"
                    f" `{step}` is not one of them"
                )
            if is_last:
                node.value[step] = value
            node = node.value[step]
            continue
        if node.value is None:
            node.value = {}
        if not isinstance(node.value, dict):
            return f"`{above}` is a single value and has no keys below it"
        if is_last and step == "base" and node.own_file:
            return f"`{above}` has a `base` already, whose keys would remain: write `{above}=FILE` instead"
        if is_last:
            node.value[str(step)] = value
        else:
            node = node.value.setdefault(str(step), Node({}, value.position))
    return None


# --- differences between recipes, and keys that may change when a run resumes ---


UNSET = object()
"""The value of a key that only the other recipe has."""

CLASSES_IN_TRAINING = {
    "free": """
        logging_* log_* project trackio_* include_num_input_tokens_seen hub_private_repo skip_memory_metrics
        dataloader_* ddp_timeout parallelism_config deepspeed fsdp fsdp_config vllm_server_*
        per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps gradient_checkpointing*
        torch_compile* use_liger_kernel use_cpu full_determinism torch_empty_cache_steps
    """,  # logging, launching, and ways to compute the same step
    # The optimizer's state has the type of the weights; the loss, the teacher and the reference define the objective;
    # the last ones define the rows of a step.
    "fixed": """
        bf16 fp16
        loss_type loss_weights teacher_* ref_*
        num_generations num_iterations steps_per_generation generation_batch_size
    """,
}
"""Class -> keys of `training:`. All others may change from a step on, such as `max_grad_norm`: the config object is
created again at each start."""


def class_of_change(key: str) -> str:
    """Return when a key may change: `free`, whenever a run resumes; `from_step`, from a step on; `fixed`, only in
    another run. KeyError if the recipe has no such section.

    Args:
        key: such as `optimizer.betas`, `data.sources[general].weight` or `training.bf16`. Options that the schema
            does not list have the class of their section, but learning rates may change from a step on.
    """
    without_indexes = re.sub(r"\[.*?\]", "", key)
    first, *below = (step for step in without_indexes.split(".") if not step.isdigit())
    if first == "training" and below:
        return class_in_training(below[0])
    field = keys_of(Recipe)[first]
    change_class = own_class_of_change(field)
    assert change_class is not None, "every top-level key has a class"
    if first == "optimizer" and below and below[-1].endswith("learning_rate"):
        return "from_step"
    annotation = field.annotation
    for step in below:
        section = section_in(item_in(annotation) or annotation)
        if section is not None and step in keys_of(section):
            change_class = own_class_of_change(keys_of(section)[step]) or change_class
        annotation = child_annotation(section, step)
    return change_class


def class_in_training(key: str) -> str:
    for change_class, patterns in CLASSES_IN_TRAINING.items():
        if any(fnmatch(key, pattern) for pattern in patterns.split()):
            return change_class
    return "from_step"


def own_class_of_change(field: FieldInfo) -> str | None:
    """Return the class of a field of the schema; None for a component's name, which has its section's class."""
    for mark in field.metadata:
        if mark in CLASSES_OF_CHANGE:
            return str(mark)
    return None


@dataclass(frozen=True)
class Change:
    """A key with different values in two recipes; `UNSET` where a recipe has no such key."""

    key: str
    before: Any
    after: Any

    @property
    def kind(self) -> str:
        return class_of_change(self.key)

    def __str__(self) -> str:
        return f"{self.key}: {format_setting(self.before)} -> {format_setting(self.after)}"


def format_setting(value: Any) -> str:
    if value is UNSET:
        return "not set"
    return in_yaml(without_defaults(value))


def without_defaults(value: Any) -> Any:
    """Return a source without the keys that have their defaults; any other value unchanged."""
    if not isinstance(value, dict) or "path" not in value:
        return value
    fields = keys_of(Source)
    source = {}
    for key, setting in value.items():
        if key not in fields or setting != fields[key].get_default():
            source[key] = setting
    return source


def changes_between(before: Recipe, after: Recipe) -> list[Change]:
    """Return the deepest keys that differ, in the schema's order."""
    trees = [recipe.model_dump(mode="json", by_alias=True) for recipe in (before, after)]
    for tree in trees:  # an earlier version may have accepted keys that had no effect
        tree["training"] = accepted_keys(tree["training"], tree["stage"])
    return [Change(key, *values) for key, values in differing_values(trees)]


def differing_keys(before: Recipe, after: Recipe) -> list[str]:
    """Return a line `optimizer.learning_rate: 1e-5 -> 2e-5` for each different key that may not change freely."""
    return [str(change) for change in changes_between(before, after) if change.kind != "free"]


def differing_values(values: Sequence[Any], above: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield the deepest keys whose values differ, such as `data.sources[general].weight`, with each recipe's value.

    Sections in a list are compared by their names, or by index if names are missing or repeated.
    """
    sections = [by_name(value) for value in values]
    if sections and all(isinstance(section, dict) for section in sections):
        keys = dict.fromkeys(key for section in sections for key in section)
        for key in keys:
            name = f"{above}{key}" if key.startswith("[") else f"{above}.{key}".removeprefix(".")
            yield from differing_values([section.get(key, UNSET) for section in sections], name)
        if isinstance(values[0], list):
            orders = [list(section) for section in sections]
            has_same_names = all(set(order) == set(orders[0]) for order in orders)
            if has_same_names and any(order != orders[0] for order in orders):
                yield f"{above}.order", orders
    elif any(differs(value, values[0]) for value in values):
        yield above, list(values)


def differs(value: Any, other: Any) -> bool:
    """True for 1 and true, too, which are equal to Python."""
    return value != other or isinstance(value, bool) != isinstance(other, bool)


def by_name(value: Any) -> Any:
    """Index a list of sections by name (sources without one have that of their path) or number; return any other
    value unchanged."""
    if not isinstance(value, list) or not value:
        return value
    if not all(isinstance(section, dict) for section in value):
        return value
    names = []
    for index, section in enumerate(value):
        name = section.get("name")
        if not name and section.get("path"):
            name = name_of_path(section["path"])
        names.append(str(name or index))
    if len(set(names)) < len(names):
        names = [str(index) for index in range(len(value))]
    return {f"[{name}]": section for name, section in zip(names, value, strict=True)}
