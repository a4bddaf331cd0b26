"""`cpt check`: find every mistake in a recipe before spending GPU time; shape and rules need no torch."""

from importlib import import_module
from typing import Annotated

import typer

from cpt.command_line import Overrides, RecipePath
from cpt.formatting import open_console, while_working
from cpt.recipe.load import load_with_tree


def command(
    recipe: RecipePath,
    overrides: Overrides = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="Check the recipe as `cpt train --lora` runs it.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the recipe itself, in less than a second.")
    ] = False,
) -> None:
    """Find every mistake in a recipe: the shape of the file, rules between keys, and what this machine has (packages,
    files, model, disk, memory).

    Findings are printed with their line and remedy, in three groups: errors, blockers on this machine, and what was
    not checked.

    Exit code 0: all checks passed. 2: there are errors. 3: no errors, but a blocker on this machine (a missing
    package, too little disk, a run that has to finish first), or an incomplete check (a model on the Hub without a
    network, memory without a GPU). `--quick` exits with 0 or 2.

    Example: cpt check recipe.yaml data.sequence_length=2048
    """
    loaded, root = load_with_tree(recipe, overrides or (), lora=lora)
    if quick:
        typer.echo(
            f"{recipe}: keys, values and rules are fine. Not checked: files, model, packages, options."
        )
        return
    status = open_console(stderr=True).status(
        f"{recipe}: keys, values and rules are fine. Checking the rest ..."
    )
    with while_working(status):
        gate = import_module("cpt.planning.gate")  # imports torch, which takes seconds
    raise typer.Exit(gate.print_report(recipe, loaded, root).exit_code)
