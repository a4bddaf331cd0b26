"""Sections that stand in files of their own: `model: models/llama/7b.yaml`, or `model: {base: models/llama/7b.yaml,
...}`."""

import os
from pathlib import Path
from typing import Any

from cpt.recipe.schema import Component
from cpt.recipe.sections import child_annotation, is_free_mapping, item_in, presets_of, section_in
from cpt.recipe.tree import Mistakes, Node, merged
from cpt.recipe.yaml_lines import UnreadableError, read_yaml, shown_path
from cpt.shipped import SHIPPED_FILES

REPOSITORY = SHIPPED_FILES  # in an installed package, the part of it that recipes refer to


def resolved(node: Node, annotation: Any, mistakes: Mistakes, trail: tuple[Path, ...]) -> Node:
    """The tree with every reference below `node` replaced by what it refers to.

    Args:
        annotation: what the schema says of `node`.
        trail: the files that led here, to find those that refer to each other in a circle.
    """
    if section_in(annotation) or is_free_mapping(annotation):
        if isinstance(node.value, str) and node.value in presets_of(annotation):
            return Node({"preset": Node(node.value, node.place)}, node.place, node.own_file)
        if isinstance(node.value, str) and not node.value.endswith((".yaml", ".yml")) and is_component(annotation):
            return Node({"name": Node(node.value, node.place)}, node.place, node.own_file)
        if isinstance(node.value, str):
            return section_in_file(node, annotation, mistakes, trail)
        if isinstance(node.value, dict):
            return section_on_base(node, annotation, mistakes, trail)
    elif item_in(annotation) is not None and isinstance(node.value, list):
        items = [resolved(item, item_in(annotation), mistakes, trail) for item in node.value]
        return Node(items, node.place, node.own_file, node.broken)
    return node


def is_component(annotation: Any) -> bool:
    """Whether it may be written as its name alone: `[length]` for `[{name: length}]`."""
    section = section_in(annotation)
    return section is not None and issubclass(section, Component)


def section_in_file(node: Node, annotation: Any, mistakes: Mistakes, trail: tuple[Path, ...]) -> Node:
    """The section that `node`, a path, stands for."""
    if not node.value.endswith((".yaml", ".yml")):
        mistakes.add(node.place, f'expected keys and values or the path of a .yaml file, got the text "{node.value}"')
        return Node({}, node.place, own_file=True, broken=True)
    base = read_base(node, annotation, mistakes, trail)
    return Node(base.value, node.place, own_file=True, broken=base.broken)


def section_on_base(node: Node, annotation: Any, mistakes: Mistakes, trail: tuple[Path, ...]) -> Node:
    """The section with its children resolved, on top of the file that its `base:` names."""
    entries = {
        key: resolved(child, child_annotation(annotation, key), mistakes, trail)
        for key, child in node.value.items()
        if key != "base"
    }
    over = Node(entries, node.place, node.own_file, node.broken)
    if "base" not in node.value:
        return over
    written = node.value["base"]
    if not isinstance(written.value, str) or not written.value.endswith((".yaml", ".yml")):
        mistakes.add(written.place, "`base` must be the path of a .yaml file")
        return Node(entries, node.place, own_file=True, broken=True)
    base = read_base(written, annotation, mistakes, trail)
    whole = merged(over, base)
    return Node(whole.value, node.place, own_file=True, broken=whole.broken)


def read_base(written: Node, annotation: Any, mistakes: Mistakes, trail: tuple[Path, ...]) -> Node:
    """The section in the file that `written` names, its own references resolved."""
    path = find_file(written, mistakes)
    if path is None:
        return Node({}, written.place, broken=True)
    if path.resolve() in trail:
        circle = " -> ".join(shown_path(file) for file in (*trail[trail.index(path.resolve()) :], path.resolve()))
        mistakes.add(written.place, f"files that refer to each other in a circle: {circle}")
        return Node({}, written.place, broken=True)
    try:
        root = read_yaml(path, mistakes)
    except UnreadableError:
        return Node({}, written.place, broken=True)
    return resolved(root, annotation, mistakes, (*trail, path.resolve()))


def find_file(written: Node, mistakes: Mistakes) -> Path | None:
    """The file that a path in a recipe means; a mistake and None when there is none.

    It is looked for beside the file that names it, then in the current folder, then among the recipes that come with
    cpt.
    """
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
