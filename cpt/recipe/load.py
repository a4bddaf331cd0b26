"""YAML file -> Recipe, or one RecipeError that lists every mistake with its file and line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from cpt.errors import RecipeError
from cpt.recipe.overrides import apply_overrides, turn_on_lora
from cpt.recipe.references import resolved
from cpt.recipe.run_results import with_results_of_runs
from cpt.recipe.schema import Data, Recipe
from cpt.recipe.sections import keys_of
from cpt.recipe.sense import check_sense
from cpt.recipe.shape import check_shape, read_option_numbers
from cpt.recipe.training_keys import check_passed_on_keys
from cpt.recipe.tree import Mistakes, Node, holds_broken, plain
from cpt.recipe.yaml_lines import UnreadableError, read_text, read_yaml
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
    """As `load_recipe`, with the tree beside it: `tree.place_of(root, ("data", "sources", 0))` is where that was
    written."""
    mistakes = Mistakes()
    root = read_recipe(Path(path), overrides, lora, mistakes)
    return checked(root, mistakes), root


def load_mixture(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Data, int]:
    """The `data:` section and the seed of a recipe, or a mixture file: a `data:` section in a file of its own, with
    the default seed.

    Args:
        overrides: `data.key=value`, on top of the file.

    Raises:
        RecipeError: all mistakes.
    """
    mistakes = Mistakes()
    root = readable(Path(path), mistakes)
    if root.value.keys() & keys_of(Recipe).keys():
        recipe = load_recipe(path, overrides)
        return recipe.data, recipe.seed
    data = json.dumps(str(Path(path).resolve()))
    around = f"name: mixture\nmodel: {{path: none}}\nbudget: {{epochs: 1}}\ndata: {data}\n"  # the required sections
    root = resolved(read_text(around.encode(), str(path), mistakes), Recipe, mistakes, trail=())
    recipe = checked(apply_overrides(root, overrides, mistakes), mistakes)
    return recipe.data, recipe.seed


def checked(root: Node, mistakes: Mistakes) -> Recipe:
    """The recipe of a tree, or one error with all mistakes."""
    check_passed_on_keys(root, mistakes)
    read_option_numbers(root, mistakes)
    values = plain(root)
    recipe, faulty = check_shape(root, values, mistakes)
    faulty |= {key for key, child in root.value.items() if holds_broken(child)}
    if not root.broken:
        check_sense(sound_sections(values, faulty), root, mistakes)
    mistakes.raise_if_any()
    assert recipe is not None, "a recipe without mistakes has a shape"
    return with_results_of_runs(recipe)


def read_recipe(path: Path, overrides: Sequence[str], lora: bool, mistakes: Mistakes) -> Node:
    """The recipe's tree: its file, the files it refers to, and the command line on top."""
    root = readable(path, mistakes)
    refuse_other_files(path, root)
    root = resolved(root, Recipe, mistakes, trail=(path.resolve(),))
    root = apply_overrides(root, overrides, mistakes)
    if lora:
        turn_on_lora(root)
    return root


def refuse_other_files(path: Path, root: Node) -> None:
    """Refuse a pipeline or a config of another tool in one sentence, instead of listing each of its keys.

    Raises:
        RecipeError: it is one.
    """
    if root.value.keys() & {"data", "budget", "base"}:
        return
    if "steps" in root.value:
        raise RecipeError(f"{path} is a pipeline. Check it: cpt pipeline {path} --dry-run")
    if names := {"base_model", "model_name_or_path"} & root.value.keys():
        tool = "axolotl" if "base_model" in names else "LLaMA-Factory or TRL"
        raise RecipeError(
            f"{path} is a config of {tool}. Translate one of axolotl or LLaMA-Factory: cpt import {path} --output"
            " my_recipe.yaml"
        )


def readable(path: Path, mistakes: Mistakes) -> Node:
    """The tree of one file; a file that cannot be read ends it here."""
    try:
        return read_yaml(path, mistakes)
    except UnreadableError:
        mistakes.raise_if_any()
        raise


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
    """The resolved recipe as YAML that `load_recipe` reads back to an equal one: every key in the schema's order,
    defaults too."""
    return write_yaml(recipe.model_dump(mode="json", by_alias=True))
