"""`cpt search RECIPE`: search values of a recipe's keys (--space), or run a range test (--learning-rates)."""

import os
from pathlib import Path
from typing import Annotated

import typer

from cpt.command_line import Launcher, Overrides, Processes, RecipePath, refuse_ignored, show_log
from cpt.contrib.search.search import SEARCHED, TEXT_STAGES, Search, options_of_train, range_test
from cpt.contrib.search.space import Space, load_space, open_study, recipes_at_ends, storage_errors
from cpt.distributed import print_once
from cpt.errors import Interrupted, RecipeError, ResourceError
from cpt.files import free_name, locked, write_atomic
from cpt.hardware import find_gpus
from cpt.launch.supervise import refuse_launcher
from cpt.plugins import did_you_mean
from cpt.recipe.load import differing_keys, dump_recipe, load_recipe
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Recipe

STEPS = 200
OF_TRAINING = ("loss", "loss_smoothed", "grad_norm", "tokens_per_second")
OF_SETS = ("bits_per_byte", "loss", "perplexity", "accuracy")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def command(
    recipe: RecipePath,
    overrides: Overrides = None,
    space: Annotated[
        Path | None, typer.Option(help="YAML file: keys with their ranges, and `search:`.")
    ] = None,
    learning_rates: Annotated[
        tuple[float, float] | None,
        typer.Option(help="LOW HIGH: one run with a growing learning rate."),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=20, help="With --learning-rates: length of that run.")
    ] = STEPS,
    parallel: Annotated[
        int, typer.Option(min=1, help="Trials at a time; each gets its share of the GPUs.")
    ] = 1,
    processes: Processes = 1,
    launcher: Launcher = None,
    storage: Annotated[
        str | None, typer.Option(help="URL of Optuna's storage, for several machines.")
    ] = None,
    new: Annotated[
        bool, typer.Option("--new", help="Start another search of the same name (appends -2).")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check the space and its recipes.")
    ] = False,
) -> None:
    """Search for better values of a recipe's keys; each trial is a run.

    Repeat the command to continue a search.

    Example: cpt search recipe.yaml --space space.yaml --parallel 2
    """
    show_log()
    refuse_launcher("search", sets_processes=processes > 1, launcher=launcher)
    options = options_of_train(processes, launcher)
    if learning_rates is not None and space is None:
        ignored = {
            "--parallel": parallel > 1,
            "--storage": storage is not None,
            "--dry-run": dry_run,
        }
        refuse_ignored(ignored, "with --learning-rates, because it is one run")
        range_test(recipe, overrides or (), *learning_rates, steps=steps, options=options, new=new)
        return
    if space is None or learning_rates is not None:
        raise RecipeError("use either --space SPACE.yaml, or --learning-rates LOW HIGH.")
    refuse_ignored({"--steps": steps != STEPS}, "without --learning-rates")
    loaded = load_recipe(recipe, overrides or ())
    search_space = load_space(space)
    refuse_unlogged_metric(search_space, loaded)
    recipes_at_ends(search_space, recipe, overrides or ())
    if dry_run:
        print_once(f"{space}: no mistakes.")
        return
    folder = loaded.output_dir / (search_space.settings.name or f"{loaded.name}-search")
    folder = free_name(folder) if new else folder
    if (folder / SEARCHED).exists() and (
        changes := differing_keys(load_recipe(folder / SEARCHED), loaded)
    ):
        text = f"{folder} is a search with another recipe. Differences (there -> here):"
        raise RecipeError(
            "\n".join([text, *changes, "Undo the change, or start a new search: --new."])
        )
    environments = environments_of(parallel, processes)
    lock = folder / (f".lock-{os.uname().nodename}" if storage else ".lock")
    with locked(lock, f"another process searches in {folder}. Wait for it, stop it, or use --new."):
        url = storage or f"sqlite:///{(folder / 'study.db').absolute()}"
        study = open_study(url, folder.name, search_space)
        write_atomic(folder / SEARCHED, dump_recipe(loaded))
        search = Search(folder, loaded, search_space, study, options, environments)
        try:
            with storage_errors(url):
                search()
        except Interrupted:
            search.show_results()
            raise
        search.show_results()


def refuse_unlogged_metric(space: Space, recipe: Recipe) -> None:
    """RecipeError if no run of the recipe logs the metric. Stages of examples log TRL's metrics."""
    metric = space.settings.metric
    evaluation = recipe.evaluation
    sets = [*(recipe.data.sources if evaluation.held_out_share else ()), *evaluation.perplexity]
    known_metrics = []
    for held_out_set in sets:
        for metric_of_set in OF_SETS:
            known_metrics.append(f"eval_{reported_name(held_out_set)}_{metric_of_set}")
    known_metrics += OF_TRAINING
    if metric not in known_metrics and (
        recipe.stage in TEXT_STAGES or metric.startswith("eval_") and not sets
    ):
        raise RecipeError(
            f"{space.position}: `search.metric`: no run of this recipe logs `{metric}`."
            f"{did_you_mean(metric, known_metrics)} It logs: {', '.join(known_metrics)}. Held-out sets:"
            " `evaluation.held_out_share` or `evaluation.perplexity`."
        )


def environments_of(parallel: int, processes: int) -> list[dict[str, str]]:
    """Environment variables of parallel trials: each gets an equal share of the GPUs, at least one per process."""
    every = ",".join(map(str, range(len(find_gpus()))))
    gpus = [name.strip() for name in os.environ.get(VISIBLE, every).split(",") if name.strip()]
    if parallel == 1 or not gpus:
        return [{}] * parallel
    if len(gpus) < parallel * processes:
        raise ResourceError(
            f"--parallel {parallel} needs {parallel * processes} GPUs; this machine has {len(gpus)}."
        )
    share = len(gpus) // parallel
    environments = []
    for slot in range(parallel):
        environments.append({VISIBLE: ",".join(gpus[slot * share : (slot + 1) * share])})
    return environments
