"""Load a recipe from YAML, or raise one RecipeError that lists every mistake with its file and line."""

import json
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
    Location,
    Mistakes,
    Node,
    Position,
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
    keys = root.value.keys()
    if keys & {
        "steps",
        "base_model",
        "model_name_or_path",
        "dataset",
        "train_dataset",
    } and not keys & {
        "data",
        "budget",
        "base",
    }:
        raise RecipeError(
            f"{path} is not a recipe. Check a pipeline: cpt pipeline {path} --dry-run. Translate a config of"
            f" axolotl, LLaMA-Factory or ms-swift: cpt import {path} --output my_recipe.yaml"
        )
    root = resolve_references(root, Recipe, mistakes, trail=(path.resolve(),))
    root = apply_overrides(root, overrides, mistakes)
    model = root.value.get("model")
    if lora and model is not None and isinstance(model.value, dict):
        options = model.value.get("lora")
        if options is None or options.value is None:
            model.value["lora"] = Node({}, Position("on the command line: `--lora`", 0))
    leave_out_former_keys(root, path)
    return check_tree(root, mistakes), root


def leave_out_former_keys(root: Node, path: Path) -> None:
    """Warn of keys that are refused today, but had no effect when an earlier version began this run; drop them."""
    training = node_at(root, ("training",))
    saved = recipe_of_run(root, path)
    if training is None or not isinstance(training.value, dict):
        return
    stage = str(saved.get("stage", "cpt"))
    former = saved.get("training")
    dropped = drop_former_keys(training, former, stage) if isinstance(former, dict) else []
    if dropped:
        warn_of_former_keys(", ".join(dropped), str(plain(root).get("name")))


@cache
def warn_of_former_keys(keys: str, run: str) -> None:
    """Once in a process: the run's own files are read again and again."""
    log.warning(
        f"{keys} had no effect in the run {run}, which an earlier version began, and is left out. Remove it from the"
        " recipe."
    )


def recipe_of_run(root: Node, path: Path) -> dict[str, Any]:
    """Return the recipe that the run's folder has, as it was written; empty if there is no run yet."""
    folder = path.parent
    if path.name != RECIPE or not (folder / STATUS).is_file():
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


def drop_former_keys(
    section: Node, saved: Mapping[str, Any], stage: str, above: str = ""
) -> list[str]:
    """Drop the keys that have the saved value; return them."""
    dropped = list[str]()
    for name, node in list(section.value.items()):
        key = f"{above}{name}"
        value = plain(node)
        before = saved.get(name, ...)
        if key in NESTED and isinstance(value, dict) and isinstance(before, dict):
            dropped += drop_former_keys(node, before, stage, f"{key}.")
            if not node.value:
                del section.value[name]
        elif value == before and is_refused(key, value, stage) and had_no_effect(key, saved):
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
    around = {"name": key, "stage": "pretrain", **required, key: str(Path(path).resolve())}
    root = resolve_references(
        read_text(json.dumps(around).encode(), str(path), mistakes), Recipe, mistakes, trail=()
    )
    own = ("data", "evaluation") if key == "data" else ("model",)
    return check_tree(apply_overrides(root, overrides, mistakes), mistakes, own)


def check_tree(root: Node, mistakes: Mistakes, own: Collection[str] = ()) -> Recipe:
    """Return the recipe of a tree, or raise one error with all mistakes; rules are checked in its `own` sections."""
    expand_paths(root, mistakes)
    check_passed_on_keys(root, mistakes)
    add_retain_presets(root, mistakes)
    deepspeed = node_at(root, ("training", "deepspeed"))
    if (
        deepspeed is not None
        and isinstance(deepspeed.value, str)
        and not deepspeed.value.lstrip().startswith("{")
    ):
        path = find_file(deepspeed, mistakes)
        deepspeed.value = (
            deepspeed.value if path is None else shown_path(path)
        )  # relative to the current folder
    read_option_numbers(root, mistakes)
    values = plain(root)
    recipe, faulty = check_shape(root, values, mistakes)
    faulty |= {key for key, child in root.value.items() if holds_broken(child)}
    if (
        not root.broken
    ):  # the rules between sections without mistakes are checked along with the rest
        sections = {}
        for key, field in keys_of(Recipe).items():
            if key not in faulty and (not own or key in own):
                adapter: TypeAdapter[Any] = TypeAdapter(field.annotation or Any)
                sections[key] = (
                    adapter.validate_python(values[key]) if key in values else field.get_default()
                )
        check_rules(sections, root, mistakes)
    mistakes.raise_if_any()
    assert recipe is not None, "a recipe without mistakes has a shape"
    model = recipe.model.model_copy(update={"path": result_of_run(recipe.model.path)})
    tokenizer = recipe.tokenizer.model_copy(update={"path": result_of_run(recipe.tokenizer.path)})
    return recipe.model_copy(update={"model": model, "tokenizer": tokenizer})


def add_retain_presets(root: Node, mistakes: Mistakes) -> None:
    """Add what the words of `evaluation.retain` stand for to `evaluation.perplexity` or `.tasks`. A word that is the
    name of a source or held-out set is that set, so a saved recipe is loaded as an equal one."""
    retain = node_at(root, ("evaluation", "retain"))
    if retain is None or not isinstance(retain.value, dict):
        return
    lists = [node_at(root, at) for at in (("data", "sources"), ("evaluation", "perplexity"))]
    sources = [
        plain(one)
        for found in lists
        if found and isinstance(found.value, list)
        for one in found.value
    ]
    known = {
        str(one.get("name") or name_of_path(str(one.get("path"))))
        for one in sources
        if isinstance(one, dict)
    }
    evaluation = root.value["evaluation"].value
    for word in [word for word in RETAIN_PRESETS if word in retain.value and word not in known]:
        for key, added in read_yaml(RETAIN_FILES / f"{word}.yaml", mistakes).value.items():
            before = evaluation.get(key, Node([], retain.position))
            if isinstance(before.value, list):  # otherwise a mistake, which is reported later
                names = [
                    one.get("name") for one in map(plain, before.value) if isinstance(one, dict)
                ]
                new = [one for one in added.value if one.value["name"].value not in names]
                evaluation[key] = Node(
                    [*before.value, *new], before.position, before.own_file, before.broken
                )
            if key == "tasks" and retain.value.pop(word).value is not None:
                text = "must be null: tasks are evaluated after the run, so a score cannot stop it"
                mistakes.add(retain.position, f"`evaluation.retain.{word}`: {text}")


def dump_recipe(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML that `load_recipe` reads back as an equal recipe: every key in the schema's
    order, including defaults."""
    return write_yaml(recipe.model_dump(mode="json", by_alias=True))


RETAIN_FILES = SHIPPED_FILES / "recipes" / "presets" / "retain"
REPOSITORY = SHIPPED_FILES  # in an installed package, the files that recipes refer to


def resolve_references(
    node: Node, annotation: Any, mistakes: Mistakes, trail: tuple[Path, ...]
) -> Node:
    """Replace every reference below `node` by the content of its file. `trail`: the files that led here, to detect
    circular references."""
    section = section_in(annotation)
    value = node.value
    is_word = isinstance(value, str) and not value.endswith((".yaml", ".yml"))
    if annotation == Evaluation.model_fields["retain"].annotation and (
        is_word or isinstance(value, list)
    ):
        entries = dict[str, Node]()  # `general` is short for `{general: null}`
        for one in value if isinstance(value, list) else [node]:
            entries |= (
                one.value
                if isinstance(one.value, dict)
                else {str(plain(one)): Node(None, one.position)}
            )
        return Node(entries, node.position, node.own_file)
    if isinstance(value, list) and item_in(annotation) is not None:
        items = [resolve_references(item, item_in(annotation), mistakes, trail) for item in value]
        return Node(items, node.position, node.own_file, node.broken)
    if not (section or is_free_mapping(annotation)) or not isinstance(value, str | dict):
        return node
    if isinstance(value, str):
        if value in LORA_PRESETS and annotation == Model.model_fields["lora"].annotation:
            return Node({"preset": Node(value, node.position)}, node.position, node.own_file)
        if value.endswith((".yaml", ".yml")):
            base = read_base(node, annotation, mistakes, trail)
            return Node(base.value, node.position, own_file=True, broken=base.broken)
        if section is not None and issubclass(section, Component):
            return Node({"name": Node(value, node.position)}, node.position, node.own_file)
        mistakes.add(
            node.position,
            f'expected keys and values or the path of a .yaml file, got the text "{value}"',
        )
        return Node({}, node.position, own_file=True, broken=True)
    entries = {
        key: resolve_references(child, child_annotation(annotation, key), mistakes, trail)
        for key, child in value.items()
        if key != "base"
    }
    over = Node(entries, node.position, node.own_file, node.broken)
    if "base" not in value:
        return over
    written = value["base"]
    if not isinstance(written.value, str) or not written.value.endswith((".yaml", ".yml")):
        mistakes.add(written.position, "`base` must be the path of a .yaml file")
        return Node(entries, node.position, own_file=True, broken=True)
    whole = merged(over, read_base(written, annotation, mistakes, trail))
    return Node(whole.value, node.position, own_file=True, broken=whole.broken)


def read_base(written: Node, annotation: Any, mistakes: Mistakes, trail: tuple[Path, ...]) -> Node:
    """Return the section in the file that `written` names, with its references resolved."""
    path = find_file(written, mistakes)
    if path is not None and path.resolve() in trail:
        circle = " -> ".join(
            shown_path(file) for file in (*trail[trail.index(path.resolve()) :], path.resolve())
        )
        mistakes.add(written.position, f"circular reference: {circle}")
    elif path is not None:
        with suppress(UnreadableError):
            return resolve_references(
                read_yaml(path, mistakes), annotation, mistakes, (*trail, path.resolve())
            )
    return Node({}, written.position, broken=True)


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


def find_file(written: Node, mistakes: Mistakes) -> Path | None:
    """Find the file that a path in a recipe names: in the folder of the recipe, in the current folder, or among the
    recipes that come with cpt. If there is no such file, add a mistake and return None."""
    beside = Path(written.position.file).parent if written.position.line else Path()
    folders = [beside, Path(), REPOSITORY / "recipes", REPOSITORY]
    try:
        asked = Path(expanded(written.value))
    except ValueError as problem:
        mistakes.add(written.position, str(problem))
        return None
    for folder in folders:
        if (folder / asked).is_file():
            return Path(os.path.normpath(folder / asked))
    looked = dict.fromkeys(str(folder.resolve()) for folder in folders)
    where = "" if asked.is_absolute() else f" (searched: {', '.join(looked)})"
    mistakes.add(written.position, f"no such file: {written.value}{where}")
    return None


def apply_overrides(root: Node, overrides: Sequence[str], mistakes: Mistakes) -> Node:
    """Apply the overrides to the tree; later ones win."""
    for override in overrides:
        position = Position(f"on the command line: `{override}`", 0)
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
    here = root
    for number, step in enumerate(steps):
        is_last = number == len(steps) - 1
        above = dotted(steps[:number])
        if isinstance(here.value, list):
            if not isinstance(step, int) or step >= len(here.value):
                entries = f"{len(here.value)} {'entry' if len(here.value) == 1 else 'entries'}, counted from 0"
                return f"`{above}` has {entries}: `{step}` is not one of them"
            if is_last:
                here.value[step] = value
            here = here.value[step]
            continue
        if here.value is None:
            here.value = {}
        if not isinstance(here.value, dict):
            return f"`{above}` is a single value and has no keys below it"
        if is_last and step == "base" and here.own_file:
            return f"`{above}` has a `base` already, whose keys would remain: write `{above}=FILE` instead"
        if is_last:
            here.value[str(step)] = value
        else:
            here = here.value.setdefault(str(step), Node({}, value.position))
    return None


# --- differences between recipes, and keys that may change when a run resumes ---


UNSET = object()
"""The value of a key that only the other recipe has."""

CLASSES_IN_TRAINING = {
    "free": (  # logging, launching, and ways to compute the same step
        *(
            "logging_*",
            "log_*",
            "project",
            "trackio_*",
            "include_num_input_tokens_seen",
        ),
        *(
            "hub_private_repo",
            "skip_memory_metrics",
            "per_device_eval_batch_size",
        ),
        *(
            "dataloader_*",
            "ddp_timeout",
            "parallelism_config",
            "deepspeed",
            "fsdp",
            "fsdp_config",
            "vllm_server_*",
        ),
        *(
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "gradient_checkpointing*",
            "torch_compile*",
        ),
        *("use_liger_kernel", "use_cpu", "full_determinism", "torch_empty_cache_steps"),
    ),
    "fixed": (
        *("bf16", "fp16"),  # the optimizer's state has the type of the weights
        *("loss_type", "loss_weights"),  # the loss defines the objective
        *("teacher_*", "ref_*"),  # so do teacher and reference
        *(
            "num_generations",
            "num_iterations",
            "steps_per_generation",
            "generation_batch_size",
        ),  # rows of a step
    ),
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
    first, *below = (step for step in re.sub(r"\[.*?\]", "", key).split(".") if not step.isdigit())
    if first == "training" and below:
        classes = [
            one
            for one, patterns in CLASSES_IN_TRAINING.items()
            if any(fnmatch(below[0], p) for p in patterns)
        ]
        if classes:
            return classes[0]
        return "from_step"
    field = keys_of(Recipe)[first]
    found = own_class_of_change(field)
    annotation = field.annotation
    for step in below:
        section = section_in(item_in(annotation) or annotation)
        if section is not None and (below_it := keys_of(section).get(step)):
            found = own_class_of_change(below_it) or found
        annotation = child_annotation(section, step)
    assert found is not None, "every top-level key has a class"
    if first == "optimizer" and below and below[-1].endswith("learning_rate"):
        return "from_step"
    return found


def own_class_of_change(field: FieldInfo) -> str | None:
    """Return the class of a field of the schema; None for a component's name, which has its section's class."""
    return next((mark for mark in field.metadata if mark in CLASSES_OF_CHANGE), None)


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
        old, new = (
            "not set" if value is UNSET else in_yaml(without_defaults(value))
            for value in (self.before, self.after)
        )
        return f"{self.key}: {old} -> {new}"


def without_defaults(value: Any) -> Any:
    """A source without the keys that have their defaults; any other value unchanged."""
    if not isinstance(value, dict) or "path" not in value:
        return value
    fields = keys_of(Source)
    return {
        key: one
        for key, one in value.items()
        if key not in fields or one != fields[key].get_default()
    }


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
    trees: list[Any] = [by_name(value) if isinstance(value, list) else value for value in values]
    if trees and all(isinstance(tree, dict) for tree in trees):
        for key in dict.fromkeys(key for tree in trees for key in tree):
            name = f"{above}{key}" if key.startswith("[") else f"{above}.{key}".removeprefix(".")
            yield from differing_values([tree.get(key, UNSET) for tree in trees], name)
        if isinstance(values[0], list) and all(set(tree) == set(trees[0]) for tree in trees):
            orders = [list(tree) for tree in trees]
            if any(order != orders[0] for order in orders):
                yield f"{above}.order", orders
    elif any(
        value != values[0] or isinstance(value, bool) != isinstance(values[0], bool)
        for value in values
    ):
        yield above, list(values)


def by_name(items: list[Any]) -> list[Any] | dict[str, Any]:
    """Index a list of sections by name (sources without one have that of their path) or position; return any other
    list unchanged."""
    if not items or not all(isinstance(item, dict) for item in items):
        return items
    names = [
        str(item.get("name") or (name_of_path(item["path"]) if item.get("path") else place))
        for place, item in enumerate(items)
    ]
    if len(set(names)) < len(names):
        names = [str(place) for place in range(len(items))]
    return {f"[{name}]": item for name, item in zip(names, items, strict=True)}
