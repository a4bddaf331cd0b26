"""`cpt search RECIPE --space SPACE.yaml`: better values of a recipe's keys; or --learning-rates LOW HIGH, a range
test."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from cpt.command_line import refuse_ignored, show_log
from cpt.distributed import tell
from cpt.errors import Interrupted, LaunchError, RecipeError, ResourceError
from cpt.files import free_name, locked, write_atomic
from cpt.hardware import find_gpus
from cpt.launch.supervise import BY_THE_LAUNCHER
from cpt.plugins import did_you_mean
from cpt.recipe.difference import differing_keys
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Recipe
from cpt.search.search import SEARCHED, TEXT_STAGES, Search, options_of_train, range_test
from cpt.search.space import Space, load_space, open_study, recipes_at_ends, storage_errors

STEPS = 200
OF_TRAINING = ("loss", "loss_smoothed", "grad_norm", "tokens_per_second")
OF_SETS = ("bits_per_byte", "loss", "perplexity", "accuracy")
VISIBLE = "CUDA_VISIBLE_DEVICES"


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
        int, typer.Option(min=1, help="Trials at the same time on this machine; each gets its share of the GPUs.")
    ] = 1,
    processes: Annotated[int, typer.Option(min=1, help="Processes of each trial, on this machine.")] = 1,
    launcher: Annotated[
        str | None, typer.Option(help='The launcher to start them with, such as "accelerate launch".')
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="Optuna's storage URL, to search on several machines with a shared output_dir.")
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Start another search of the same name (appends -2).")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the space and the recipes at its ends; start nothing.")
    ] = False,
) -> None:
    """Search for better values of a recipe's keys; each trial is a run.

    Give the same command again to continue a search.

    Example: cpt search recipe.yaml --space space.yaml --parallel 2
    """
    show_log()
    if "RANK" in os.environ:
        raise LaunchError("a search starts the processes of its trials itself: use `cpt search` with --processes N.")
    refuse_ignored({"--processes": processes > 1 and launcher is not None}, BY_THE_LAUNCHER)
    options = options_of_train(processes, launcher)
    if learning_rates is not None and space is None:
        ignored = {"--parallel": parallel > 1, "--storage": storage is not None, "--dry-run": dry_run}
        refuse_ignored(ignored, "with --learning-rates, which is one run")
        range_test(recipe, overrides or (), *learning_rates, steps=steps, options=options, new=new)
        return
    if space is None or learning_rates is not None:
        raise RecipeError("give either --space SPACE.yaml, or --learning-rates LOW HIGH.")
    refuse_ignored({"--steps": steps != STEPS}, "without --learning-rates")
    loaded, wanted = load_recipe(recipe, overrides or ()), load_space(space)
    refuse_unlogged_metric(wanted, loaded)
    recipes_at_ends(wanted, recipe, overrides or ())
    if dry_run:
        tell(f"{space}: no mistakes.")
        return
    folder = loaded.output_dir / (wanted.settings.name or f"{loaded.name}-search")
    folder = free_name(folder) if new else folder
    if (folder / SEARCHED).exists() and (changes := differing_keys(load_recipe(folder / SEARCHED), loaded)):
        listing = "\n".join(changes)
        raise RecipeError(
            f"{folder} is a search with another recipe. What differs (there -> here):\n{listing}\nUndo the change, or"
            " start a new search: --new."
        )
    environments = environments_of(parallel, processes)
    lock = folder / (f".lock-{os.uname().nodename}" if storage else ".lock")
    with locked(lock, f"another process searches in {folder}. Wait for it, end it, or start a new search: --new."):
        url = storage or f"sqlite:///{(folder / 'study.db').absolute()}"
        study = open_study(url, folder.name, wanted)
        write_atomic(folder / SEARCHED, dump_recipe(loaded))
        search = Search(folder, loaded, wanted, study, options, environments)
        stopped: BaseException | None = None
        try:
            with storage_errors(url):
                search()
        except (Interrupted, KeyboardInterrupt) as problem:
            stopped = problem
        search.show_results()
        words = shlex.join(["cpt", "search", str(recipe), *(overrides or ()), "--space", str(space)])
        again = f"Give the same command again to continue: {words} ..."
        if isinstance(stopped, Interrupted):
            raise Interrupted(f"{stopped} {again}") from stopped
        if stopped is not None:
            tell(f"Interrupted. {again}")
            raise typer.Exit(130) from stopped


def refuse_unlogged_metric(space: Space, recipe: Recipe) -> None:
    """Check that a run of the recipe logs the metric. What stages of examples log is up to TRL.

    Raises:
        RecipeError: it does not.
    """
    metric, evaluation = space.settings.metric, recipe.evaluation
    sets = [*(recipe.data.sources if evaluation.held_out_share else ()), *evaluation.perplexity]
    known = [f"eval_{reported_name(one)}_{figure}" for one in sets for figure in OF_SETS] + list(OF_TRAINING)
    if metric not in known and (recipe.stage in TEXT_STAGES or metric.startswith("eval_") and not sets):
        raise RecipeError(
            f"{space.place}: `search.metric`: no run of this recipe logs `{metric}`.{did_you_mean(metric, known)} It"
            f" logs: {', '.join(known)}. Held-out sets: `evaluation.held_out_share` or `evaluation.perplexity`."
        )


def environments_of(parallel: int, processes: int) -> list[dict[str, str]]:
    """Environment variables of parallel trials: each gets an equal share of the GPUs.

    Raises:
        ResourceError: there are too few GPUs.
    """
    listed = os.environ.get(VISIBLE)
    gpus = [str(number) for number in range(len(find_gpus()))] if listed is None else listed.split(",")
    gpus = [name.strip() for name in gpus if name.strip()]
    if parallel == 1 or not gpus:
        return [{}] * parallel
    if len(gpus) < parallel * processes:
        raise ResourceError(
            f"--parallel {parallel} with {processes} process(es) each needs {parallel * processes} GPUs, and there are"
            f" {len(gpus)}."
        )
    share = len(gpus) // parallel
    return [{VISIBLE: ",".join(gpus[slot * share : (slot + 1) * share])} for slot in range(parallel)]
