"""YAML file -> Recipe, or one RecipeError that lists every mistake with its file and line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from cpt.recipe.overrides import apply_overrides, turn_on_lora
from cpt.recipe.references import resolved
from cpt.recipe.schema import Recipe
from cpt.recipe.sections import keys_of
from cpt.recipe.sense import check_sense
from cpt.recipe.shape import check_shape
from cpt.recipe.training_keys import check_passed_on_keys
from cpt.recipe.tree import Mistakes, Node, holds_broken, plain
from cpt.recipe.yaml_lines import UnreadableError, read_yaml
from cpt.recipe.yaml_writing import write_yaml


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
    """As `load_recipe`, with the tree beside it: `tree.place_of(root, ("data", "sources", 0))` is where that was written."""
    mistakes = Mistakes()
    root = read_recipe(Path(path), overrides, lora, mistakes)
    check_passed_on_keys(root, mistakes)
    values = plain(root)
    recipe, faulty = check_shape(root, values, mistakes)
    faulty |= {key for key, child in root.value.items() if holds_broken(child)}
    if not root.broken:
        check_sense(sound_sections(values, faulty), root, mistakes)
    mistakes.raise_if_any()
    assert recipe is not None, "a recipe without mistakes has a shape"
    return recipe, root


def read_recipe(path: Path, overrides: Sequence[str], lora: bool, mistakes: Mistakes) -> Node:
    """The recipe's tree: its file, the files it refers to, and the command line on top."""
    try:
        root = read_yaml(path, mistakes)
    except UnreadableError:
        mistakes.raise_if_any()
        raise
    root = resolved(root, Recipe, mistakes, trail=(path.resolve(),))
    root = apply_overrides(root, overrides, mistakes)
    if lora:
        turn_on_lora(root)
    return root


def sound_sections(values: dict[str, Any], faulty: set[str]) -> dict[str, Any]:
    """The sections that nothing is wrong with, so that the rules between them are checked along with the rest."""
    sections = {}
    for key, field in keys_of(Recipe).items():
        if key not in faulty:
            sections[key] = section_value(field, values[key]) if key in values else field.get_default()
    return sections


def section_value(field: FieldInfo, value: Any) -> Any:
    """One section, as the recipe would hold it."""
    adapter: TypeAdapter[Any] = TypeAdapter(field.annotation or Any)
    return adapter.validate_python(value)


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `load_recipe` reads back to an equal one: every key in the schema's order, defaults too."""
    return write_yaml(recipe.model_dump(mode="json", by_alias=True))
