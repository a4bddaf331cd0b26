"""YAML file -> Recipe, or one RecipeError that lists every mistake with its file and line."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from cpt.errors import RecipeError
from cpt.files import SHIPPED_FILES
from cpt.recipe.keys import child_annotation, is_free_mapping, item_in, keys_of, section_in
from cpt.recipe.paths import result_of_run
from cpt.recipe.rules import check_rules
from cpt.recipe.schema import CLASSES_OF_CHANGE, LORA_PRESETS, Component, Data, Model, Recipe
from cpt.recipe.shape import check_passed_on_keys, check_shape, read_option_numbers
from cpt.recipe.tree import (
    Location,
    Mistakes,
    Node,
    Place,
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


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, lora: bool = False) -> Recipe:
    """Read a recipe.

    Args:
        overrides: `key.path=value`, on top of the file.
        lora: turn `model.lora` on with its defaults, unless the recipe has it already.

    Raises:
        RecipeError: all mistakes, one per line, as `file:line: what is wrong`.
        ResourceError: the keys of the installed transformers or peft cannot be read.
    """
    return load_with_places(path, overrides, lora=lora)[0]


def load_with_places(path: str | Path, overrides: Sequence[str] = (), *, lora: bool = False) -> tuple[Recipe, Node]:
    """As `load_recipe`, and the tree: `tree.place_of(root, ("data", "sources", 0))` is where that was written."""
    path, mistakes = Path(path), Mistakes()
    root = read_or_raise(path, mistakes)
    keys = root.value.keys()
    if keys & {"steps", "base_model", "model_name_or_path"} and not keys & {"data", "budget", "base"}:
        raise RecipeError(
            f"{path} is not a recipe. Check a pipeline: cpt pipeline {path} --dry-run. Translate a config of axolotl"
            f" or LLaMA-Factory: cpt import {path} --output my_recipe.yaml"
        )
    root = resolve_references(root, Recipe, mistakes, trail=(path.resolve(),))
    root = apply_overrides(root, overrides, mistakes)
    model = root.value.get("model")
    if lora and model is not None and isinstance(model.value, dict):
        options = model.value.get("lora")
        if options is None or options.value is None:
            model.value["lora"] = Node({}, Place("on the command line: `--lora`", 0))
    return check_tree(root, mistakes), root


def load_mixture(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Data, int]:
    """The `data:` section and the seed of a recipe, or a mixture file: a `data:` section in a file of its own, with
    the default seed. Overrides are `data.key=value`."""
    mistakes = Mistakes()
    root = read_or_raise(Path(path), mistakes)
    if root.value.keys() & keys_of(Recipe).keys():
        recipe = load_recipe(path, overrides)
        return recipe.data, recipe.seed
    data = json.dumps(str(Path(path).resolve()))
    around = f"name: mixture\nmodel: {{path: none}}\nbudget: {{epochs: 1}}\ndata: {data}\n"  # the required sections
    root = resolve_references(read_text(around.encode(), str(path), mistakes), Recipe, mistakes, trail=())
    recipe = check_tree(apply_overrides(root, overrides, mistakes), mistakes)
    return recipe.data, recipe.seed


def check_tree(root: Node, mistakes: Mistakes) -> Recipe:
    """The recipe of a tree, or one error with all mistakes."""
    check_passed_on_keys(root, mistakes)
    deepspeed = node_at(root, ("training", "deepspeed"))
    if deepspeed is not None and isinstance(deepspeed.value, str) and not deepspeed.value.lstrip().startswith("{"):
        path = find_file(deepspeed, mistakes)
        deepspeed.value = deepspeed.value if path is None else shown_path(path)  # as seen from the current folder
    read_option_numbers(root, mistakes)
    values = plain(root)
    recipe, faulty = check_shape(root, values, mistakes)
    faulty |= {key for key, child in root.value.items() if holds_broken(child)}
    if not root.broken:  # the rules between sections without mistakes are checked along with the rest
        sections = {}
        for key, field in keys_of(Recipe).items():
            if key not in faulty:
                adapter: TypeAdapter[Any] = TypeAdapter(field.annotation or Any)
                sections[key] = adapter.validate_python(values[key]) if key in values else field.get_default()
        check_rules(sections, root, mistakes)
    mistakes.raise_if_any()
    assert recipe is not None, "a recipe without mistakes has a shape"
    model = recipe.model.model_copy(update={"path": result_of_run(recipe.model.path)})
    tokenizer = recipe.tokenizer.model_copy(update={"path": result_of_run(recipe.tokenizer.path)})
    return recipe.model_copy(update={"model": model, "tokenizer": tokenizer})


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `load_recipe` reads back to an equal one: every key in the schema's order,
    defaults too."""
    return write_yaml(recipe.model_dump(mode="json", by_alias=True))


REPOSITORY = SHIPPED_FILES  # in an installed package, the part of it that recipes refer to


def resolve_references(node: Node, annotation: Any, mistakes: Mistakes, trail: tuple[Path, ...]) -> Node:
    """The tree with every reference below `node` replaced by what it refers to. `trail`: the files that led here, to
    find those that refer to each other in a circle."""
    section, value = section_in(annotation), node.value
    if isinstance(value, list) and item_in(annotation) is not None:
        items = [resolve_references(item, item_in(annotation), mistakes, trail) for item in value]
        return Node(items, node.place, node.own_file, node.broken)
    if not (section or is_free_mapping(annotation)) or not isinstance(value, str | dict):
        return node
    if isinstance(value, str):
        if value in LORA_PRESETS and annotation == Model.model_fields["lora"].annotation:
            return Node({"preset": Node(value, node.place)}, node.place, node.own_file)
        if value.endswith((".yaml", ".yml")):
            base = read_base(node, annotation, mistakes, trail)
            return Node(base.value, node.place, own_file=True, broken=base.broken)
        if section is not None and issubclass(section, Component):
            return Node({"name": Node(value, node.place)}, node.place, node.own_file)
        mistakes.add(node.place, f'expected keys and values or the path of a .yaml file, got the text "{value}"')
        return Node({}, node.place, own_file=True, broken=True)
    entries = {
        key: resolve_references(child, child_annotation(annotation, key), mistakes, trail)
        for key, child in value.items()
        if key != "base"
    }
    over = Node(entries, node.place, node.own_file, node.broken)
    if "base" not in value:
        return over
    written = value["base"]
    if not isinstance(written.value, str) or not written.value.endswith((".yaml", ".yml")):
        mistakes.add(written.place, "`base` must be the path of a .yaml file")
        return Node(entries, node.place, own_file=True, broken=True)
    whole = merged(over, read_base(written, annotation, mistakes, trail))
    return Node(whole.value, node.place, own_file=True, broken=whole.broken)


def read_base(written: Node, annotation: Any, mistakes: Mistakes, trail: tuple[Path, ...]) -> Node:
    """The section in the file that `written` names, its own references resolved."""
    path = find_file(written, mistakes)
    if path is not None and path.resolve() in trail:
        circle = " -> ".join(shown_path(file) for file in (*trail[trail.index(path.resolve()) :], path.resolve()))
        mistakes.add(written.place, f"files that refer to each other in a circle: {circle}")
    elif path is not None:
        with suppress(UnreadableError):
            return resolve_references(read_yaml(path, mistakes), annotation, mistakes, (*trail, path.resolve()))
    return Node({}, written.place, broken=True)


def find_file(written: Node, mistakes: Mistakes) -> Path | None:
    """The file that a path in a recipe means: beside the file that names it, in the current folder, or among the
    recipes that come with cpt. A mistake and None when there is none."""
    beside = Path(written.place.file).parent if written.place.line else Path()
    folders = [beside, Path(), REPOSITORY / "recipes", REPOSITORY]
    asked = Path(written.value).expanduser()
    for folder in folders:
        if (folder / asked).is_file():
            return Path(os.path.normpath(folder / asked))
    looked = dict.fromkeys(str(folder.resolve()) for folder in folders)
    where = "" if asked.is_absolute() else f" (looked in {', '.join(looked)})"
    mistakes.add(written.place, f"no such file: {written.value}{where}")
    return None


def apply_overrides(root: Node, overrides: Sequence[str], mistakes: Mistakes) -> Node:
    """The tree with each override in its place; a later one wins."""
    for override in overrides:
        place = Place(f"on the command line: `{override}`", 0)
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            mistakes.add(place, "write it as `key.path=value`")
            continue
        with suppress(UnreadableError):
            value = compose(text, place, mistakes) or Node(None, place)
            if problem := set_value(root, steps_of(key.strip()), value):
                mistakes.add(place, problem)
            root = resolve_references(root, Recipe, mistakes, trail=())
    return root


def set_value(root: Node, steps: Location, value: Node) -> str | None:
    """Write `value` at a location, making sections on the way; why not, if that is impossible."""
    here = root
    for number, step in enumerate(steps):
        is_last, above = number == len(steps) - 1, dotted(steps[:number])
        if isinstance(here.value, list):
            if not isinstance(step, int) or step >= len(here.value):
                entries = f"{len(here.value)} {'entry' if len(here.value) == 1 else 'entries'}, counted from 0"
                return f"`{above}` has {entries}: there is no `{step}`"
            if is_last:
                here.value[step] = value
            here = here.value[step]
            continue
        if here.value is None:
            here.value = {}
        if not isinstance(here.value, dict):
            return f"`{above}` is a single value: nothing stands below it"
        if is_last and step == "base" and here.own_file:
            return f"`{above}` stands on a file already, whose keys would stay: write `{above}=FILE` instead"
        if is_last:
            here.value[str(step)] = value
        else:
            here = here.value.setdefault(str(step), Node({}, value.place))
    return None


# --- in which keys recipes differ, and which of them may change while a run continues ---


UNSET = object()
"""The value of a key that only another recipe has."""

CLASSES_IN_TRAINING = {
    "free": (  # what is logged, how the run is launched, and how its processes share the model
        *("logging_*", "log_*", "report_to", "project", "trackio_*", "include_num_input_tokens_seen"),
        *("push_to_hub*", "hub_*", "skip_memory_metrics", "disable_tqdm", "per_device_eval_batch_size"),
        *("dataloader_*", "ddp_timeout", "parallelism_config", "deepspeed", "fsdp", "fsdp_config", "vllm_server_*"),
    ),
    "fixed": (
        *("bf16", "fp16"),  # the optimizer's state has the type of the weights
        *("loss_type", "loss_weights", "trust_remote_code"),  # another loss is another objective
        *("teacher_*", "ref_*"),  # so is another teacher or reference
    ),
}
"""Class -> keys of `training:`. All others may change from a step on, as `max_grad_norm` does: the config class is
built anew at each start."""


def class_of_change(key: str) -> str:
    """When a key may change: `free`, at any time between a stop and a resume; `from_step`, from a step on; `fixed`, in
    another run only. A KeyError if the recipe has no such section.

    Args:
        key: such as `optimizer.betas`, `data.sources[general].weight` or `training.bf16`. An option, which the schema
            does not list, has the class of its section.
    """
    first, *below = (step for step in re.sub(r"\[.*?\]", "", key).split(".") if not step.isdigit())
    if first == "training" and below:
        classes = [one for one, patterns in CLASSES_IN_TRAINING.items() if any(fnmatch(below[0], p) for p in patterns)]
        return classes[0] if classes else "from_step"
    field = keys_of(Recipe)[first]
    found, annotation = own_class_of_change(field), field.annotation
    for step in below:
        section = section_in(item_in(annotation) or annotation)
        if section is not None and (below_it := keys_of(section).get(step)):
            found = own_class_of_change(below_it) or found
        annotation = child_annotation(section, step)
    assert found is not None, "every top-level key has a class"
    return found


def own_class_of_change(field: FieldInfo) -> str | None:
    """The class that a field of the schema was given; None for the name of a component, which has its section's."""
    return next((mark for mark in field.metadata if mark in CLASSES_OF_CHANGE), None)


def differing_keys(before: Recipe, after: Recipe) -> list[str]:
    """A line `optimizer.learning_rate: 1e-5 -> 2e-5` for each key that differs and is not free to, in the schema's
    order."""
    trees = [recipe.model_dump(mode="json", by_alias=True) for recipe in (before, after)]
    lines = []
    for key, values in differing_values(trees):
        old, new = ("not set" if value is UNSET else in_yaml(value) for value in values)
        if class_of_change(key) != "free":
            lines.append(f"{key}: {old} -> {new}")
    return lines


def differing_values(values: Sequence[Any], above: str = "") -> Iterator[tuple[str, list[Any]]]:
    """The deepest keys whose values differ, as `data.sources[general].weight`, with the value of each recipe.

    Sections in a list are compared by their names, or by their places where names are missing or repeated.
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
    elif any(value != values[0] or isinstance(value, bool) != isinstance(values[0], bool) for value in values):
        yield above, list(values)


def by_name(items: list[Any]) -> list[Any] | dict[str, Any]:
    """A list of sections by name or place; any other list as it is."""
    if not items or not all(isinstance(item, dict) for item in items):
        return items
    names = [str(item.get("name") or place) for place, item in enumerate(items)]
    if len(set(names)) < len(names):
        names = [str(place) for place in range(len(items))]
    return {f"[{name}]": item for name, item in zip(names, items, strict=True)}
