"""`key.path=value` from the command line, on top of what the files say."""

from collections.abc import Sequence

from cpt.recipe.references import resolved
from cpt.recipe.schema import Recipe
from cpt.recipe.tree import Location, Mistakes, Node, Place, dotted, steps_of
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
        if problem := put(root, steps_of(key.strip()), value):
            mistakes.add(place, problem)
        root = resolved(root, Recipe, mistakes, trail=())
    return root


def turn_on_lora(root: Node) -> None:
    """`--lora`: our defaults, unless the recipe has options of its own."""
    model = root.value.get("model")
    options = model.value if model is not None and isinstance(model.value, dict) else None
    if options is not None and ("lora" not in options or options["lora"].value is None):
        options["lora"] = Node({}, Place("on the command line: `--lora`", 0))


def put(root: Node, steps: Location, value: Node) -> str | None:
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
