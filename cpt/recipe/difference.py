"""In which keys do recipes differ, and which of them may change while a run continues?"""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

from pydantic.fields import FieldInfo

from cpt.recipe.keys import child_annotation, item_in, keys_of, section_in
from cpt.recipe.schema import CLASSES_OF_CHANGE, Recipe
from cpt.recipe.values import in_yaml

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
