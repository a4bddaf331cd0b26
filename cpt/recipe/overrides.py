"""`key.path=value` from the command line, on top of what the files say."""

import re
from collections.abc import Sequence

from cpt.recipe.references import WAYS_TO_WEIGH, resolved, take_way
from cpt.recipe.schema import Recipe
from cpt.recipe.tree import Mistakes, Node, Place
from cpt.recipe.yaml_lines import UnreadableError, read_value


def apply_overrides(root: Node, overrides: Sequence[str], mistakes: Mistakes) -> Node:
    """The tree with each override in its place; a later one wins over an earlier one."""
    for override in overrides:
        place = Place(f"on the command line: `{override}`", 0)
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            mistakes.add(place, "write it as `key.path=value`")
            continue
        try:
            value = read_value(text, place, mistakes)
        except UnreadableError:
            continue
        steps = steps_of(key.strip())
        put(root, steps, value, mistakes)
        if steps in (["data", way] for way in WAYS_TO_WEIGH) and value.value and "data" in root.value:
            take_way(root.value["data"], steps[-1])
        root = resolved(root, Recipe, mistakes, trail=())
    return root


def turn_on_lora(root: Node) -> None:
    """`--lora`: our defaults, unless the recipe has options of its own."""
    model = root.value.get("model")
    if (
        model is not None
        and isinstance(model.value, dict)
        and ("lora" not in model.value or model.value["lora"].value is None)
    ):
        model.value["lora"] = Node({}, Place("on the command line: `--lora`", 0))


def steps_of(key: str) -> list[str]:
    """`data.sources.0.weight` or `data.sources[0].weight`, step by step."""
    return re.sub(r"\[(\d+)\]", r".\1", key).split(".")


def put(root: Node, steps: list[str], value: Node, mistakes: Mistakes) -> None:
    """Write `value` at the location that the steps lead to, making sections on the way."""
    here = root
    for number, step in enumerate(steps):
        is_last = number == len(steps) - 1
        if isinstance(here.value, list):
            if not step.isdigit() or int(step) >= len(here.value):
                entries = f"{len(here.value)} {'entry' if len(here.value) == 1 else 'entries'}, counted from 0"
                mistakes.add(value.place, f"`{'.'.join(steps[:number])}` has {entries}: there is no `{step}`")
                return
            if is_last:
                here.value[int(step)] = value
            else:
                here = here.value[int(step)]
            continue
        if here.value is None:
            here.value = {}
        if not isinstance(here.value, dict):
            mistakes.add(value.place, f"`{'.'.join(steps[:number])}` is a single value: nothing stands below it")
            return
        if is_last and step == "base" and here.own_file:
            section = ".".join(steps[:number])
            mistakes.add(
                value.place,
                f"`{section}` stands on a file already, whose keys would stay: write `{section}=FILE` instead",
            )
            return
        if is_last:
            here.value[step] = value
        else:
            here = here.value.setdefault(step, Node({}, value.place))
