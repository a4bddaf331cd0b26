"""`cpt search RECIPE --space SPACE.yaml`: better values of a recipe's keys; or --learning-rates LOW HIGH, a range
test."""

import os
import shlex
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from cpt.command_line import refuse_ignored, show_log
from cpt.errors import LaunchError, RecipeError
from cpt.launchers.attempts import BY_THE_LAUNCHER
from cpt.ranks import tell
from cpt.recipe.load import load_with_places
from cpt.search.over_space import fitting_space, refuse_mistakes, search_here
from cpt.search.record import claim, is_known

STEPS = 200


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.path=value, any key of the recipe, for all trials.")
    ] = None,
    space: Annotated[
        Path | None, typer.Option(help="YAML file: keys of the recipe and what they may be, and `search:`.")
    ] = None,
    learning_rates: Annotated[
        tuple[float, float] | None,
        typer.Option(help="Lowest and highest: one run whose learning rate grows from one to the other."),
    ] = None,
    steps: Annotated[int, typer.Option(min=20, help="With --learning-rates: length of that run.")] = STEPS,
    parallel: Annotated[
        int, typer.Option(min=1, help="Trials at once on this machine; each gets GPUs of its own.")
    ] = 1,
    processes: Annotated[int, typer.Option(min=1, help="Processes of each trial, on this machine.")] = 1,
    launcher: Annotated[
        str | None, typer.Option(help='The launcher to start them with, such as "accelerate launch".')
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Run the trials on a Ray cluster, with Ray Tune.")] = False,
    new: Annotated[bool, typer.Option("--new", help="Start beside a search of the same name (appends -2).")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the space and the recipes at its ends; start nothing.")
    ] = False,
) -> None:
    """Search for better values of a recipe's keys; each trial is a run. Give the same command again to go on.

    Give the same command again to go on.

    Example: cpt search recipe.yaml --space space.yaml --parallel 2
    """
    show_log()
    if "RANK" in os.environ:
        raise LaunchError(
            "a search starts its trials' processes itself: type `cpt search RECIPE --space FILE`, with --processes N."
        )
    if (space is None) == (learning_rates is None):
        raise RecipeError("give either --space SPACE.yaml, or --learning-rates LOW HIGH.")
    refuse_ignored({"--processes": processes > 1 and launcher is not None}, BY_THE_LAUNCHER)
    refuse_ignored(
        {"--parallel": parallel > 1 and ray}, "with --ray: `search:` of the space says how many trials run at once"
    )
    if learning_rates is None:
        refuse_ignored({"--steps": steps != STEPS}, "without --learning-rates")
    else:
        refuse_ignored(
            {"--parallel": parallel > 1, "--ray": ray, "--dry-run": dry_run}, "with --learning-rates, which is one run"
        )
    loaded, root = load_with_places(recipe, overrides or ())
    if learning_rates is not None:
        module = import_module("cpt.search.range_test")  # with numpy
        module.range_test(loaded, root, *learning_rates, steps=steps, processes=processes, launcher=launcher, new=new)
        return
    assert space is not None
    wanted = fitting_space(space, loaded)
    if dry_run or not is_known(loaded, wanted, new=new):
        refuse_mistakes(wanted, loaded, root)
    if dry_run:
        tell(f"{space}: no mistakes.")
        return
    record = claim(loaded, root, wanted, new=new)
    search = import_module("cpt.search.on_ray").search_with_ray if ray else partial(search_here, parallel=parallel)
    options = {"--parallel": parallel, "--processes": processes, "--launcher": launcher}
    given = [word for name, value in options.items() if value not in (1, None) for word in (name, str(value))] + [
        "--ray"
    ] * ray
    again = shlex.join(["cpt", "search", str(recipe), *(overrides or ()), "--space", str(space), *given])
    search(record, again, processes=processes, launcher=launcher)
