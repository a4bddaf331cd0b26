"""`cpt check`: every mistake of a recipe before GPU time is spent; shape and sense answer before torch is imported."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from cpt.recipe.load import load_with_places


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="As `cpt train --lora` would run it.")] = False,
) -> None:
    """The three gates: shape, sense, reality."""
    loaded, root = load_with_places(recipe, overrides or (), lora=lora)
    raise typer.Exit(import_module("cpt.preflight.gate").report(recipe, loaded, root))
