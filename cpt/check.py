"""`cpt check`: every mistake of a recipe before GPU time is spent; shape and sense answer before torch is imported."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from cpt.console import open_console, while_working
from cpt.recipe.load import load_with_places


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="As `cpt train --lora` would run it.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="The first two gates only, in less than a second: no torch is imported.")] = False,
) -> None:
    """The three gates: shape, sense, reality.

    Three gates: the shape of the file, what its keys mean together, and what is really there: packages, files, model, disk, memory.
    Exit code 2 where there is a mistake; each is printed with its line and its remedy.

    Example: cpt check recipe.yaml data.sequence_length=2048
    """
    loaded, root = load_with_places(recipe, overrides or (), lora=lora)
    if quick:
        typer.echo(f"{recipe}: shape and sense hold. Not looked at: what is really there (--quick).")
        return
    with while_working(open_console(stderr=True).status(f"{recipe}: shape and sense hold. Looking at what is really there ...")):
        gate = import_module("cpt.preflight.gate")  # and with it torch, which takes seconds
    raise typer.Exit(gate.report(recipe, loaded, root))
