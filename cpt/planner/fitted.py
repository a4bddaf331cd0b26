"""Write a recipe with a few keys changed; everything else of its file stays, with its comments."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from cpt.errors import RecipeError
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.recipe.words import in_yaml


def write_fitted(
    recipe: Path,
    output: Path,
    overrides: Sequence[str],
    changes: Mapping[str, Any],
    *,
    lora: bool = False,
    force: bool = False,
) -> None:
    """Write it beside the recipe with its comments, or elsewhere as the whole resolved recipe.

    Args:
        overrides: `key.path=value` of the command line, which the written recipe holds too.
        changes: key with dots -> value.

    Raises:
        RecipeError: the output exists, or the recipe cannot be rewritten.
    """
    if output.exists() and not force:
        raise RecipeError(f"{output} exists. Choose another name with --write, or write over it with --force.")
    words = [*overrides, *(f"{key}={in_yaml(value)}" for key, value in changes.items())]
    whole = load_recipe(recipe, words, lora=lora)
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.resolve().parent != recipe.resolve().parent or overrides or lora:  # its relative paths would break
        output.write_text(dump_recipe(whole), encoding="utf-8")
        return
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 1000
    yaml.indent(mapping=2, sequence=4, offset=2)
    tree = yaml.load(recipe.read_text(encoding="utf-8"))
    for key, value in changes.items():
        *above, last = key.split(".")
        section = tree
        for step in above:
            if not isinstance(section.get(step), dict):
                section[step] = CommentedMap()
            section = section[step]
        section[last] = value
    with output.open("w", encoding="utf-8") as file:
        yaml.dump(tree, file)
    if load_recipe(output) != whole:
        output.unlink()
        raise RecipeError(f"{recipe} cannot be rewritten with its comments. Give --write a file in another folder.")
