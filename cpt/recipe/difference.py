"""In what two resolved recipes differ: one line per key, `optimizer.learning_rate: 1e-5 -> 2e-5`."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from itertools import zip_longest
from typing import Any

from cpt.recipe.schema import Recipe
from cpt.recipe.tree import Location, dotted
from cpt.recipe.values import in_yaml

UNSET = object()

SAME_RUN_ANYWAY = (
    "name",
    "description",
    "tags",
    "output_dir",
    "monitoring",
    "safety",
    "training.logging_*",
    "training.log_*",
    "training.dataloader_*",
    "training.ddp_timeout",
    "training.parallelism_config",
    "training.push_to_hub",
    "training.hub_*",
    "training.deepspeed",
    "training.fsdp",
    "training.fsdp_config",
)
"""What may change between a run and its continuation: who watches over it, how it is launched, and how its processes
share the model."""


def differing_keys(before: Recipe, after: Recipe, ignoring: Sequence[str] = SAME_RUN_ANYWAY) -> list[str]:
    """The keys whose values differ, in the schema's order.

    Args:
        ignoring: keys that do not count, with all that stands below them; `*` stands for any text.
    """
    return [
        f"{key}: {shown(old)} -> {shown(new)}"
        for key, old, new in differences(
            before.model_dump(mode="json", by_alias=True), after.model_dump(mode="json", by_alias=True), ()
        )
        if not any(fnmatch(key, pattern) or fnmatch(key, f"{pattern}[.[]*") for pattern in ignoring)
    ]


def differences(old: Any, new: Any, above: Location) -> Iterator[tuple[str, Any, Any]]:
    """The deepest keys that differ, with both values; UNSET stands for a key that only the other one has."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key, UNSET), new.get(key, UNSET), (*above, key))
    elif isinstance(old, list) and isinstance(new, list):
        for index, (left, right) in enumerate(zip_longest(old, new, fillvalue=UNSET)):
            yield from differences(left, right, (*above, index))
    elif old != new:
        yield dotted(above), old, new


def shown(value: Any) -> str:
    """The value as YAML has it, or that there is none."""
    return "not set" if value is UNSET else in_yaml(value)
