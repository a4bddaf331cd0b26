"""A space searched on this machine: checked, its trials run, and what they found told."""

import signal
from dataclasses import replace
from pathlib import Path

import typer

from cpt.errors import Interrupted, RecipeError
from cpt.launchers.attempts import command_of_attempt
from cpt.ranks import tell
from cpt.recipe.schema import Component, Recipe
from cpt.recipe.tree import Node
from cpt.search.figures import is_compared_on_the_way, refuse_unlogged_metric
from cpt.search.gates import mistakes_of
from cpt.search.machine import environments
from cpt.search.pruners import build_pruner
from cpt.search.record import SearchRecord
from cpt.search.results import importance_of, options_of_train, remove_weights, results_of, show_results, write_results
from cpt.search.samplers import build_sampler
from cpt.search.search import Draw, Search
from cpt.search.space import Space, load_space, recipes_at_ends
from cpt.search.study import STUDY, Study, open_study, storage_errors
from cpt.search.trial import TrialRun

NO_PRUNER = Component(name="none")
BASE = "the recipe itself"


def search_here(
    record: SearchRecord, again: str, *, parallel: int = 1, processes: int = 1, launcher: str | None = None
) -> None:
    """Run all trials that are not over, and show what they found.

    Args:
        again: the command that goes on.

    Raises:
        Interrupted: it was told to stop, or a trial was.
        TrainingError: trials fail again and again in the same way.
        typer.Exit: Ctrl-C.
    """
    shares, metric = environments(parallel, processes), record.space.settings.metric
    launched = options_of_train(processes, launcher)

    def start(draw: Draw) -> TrialRun:
        words = command_of_attempt([str(record.write_trial(draw.number, draw.values))], processes, launcher)
        return TrialRun(
            record.run_of(draw.number),
            words,
            metric,
            record.log_of(draw.number),
            shares[draw.slot],
            pruned=draw.pruned,
        )

    study = open_study(record.folder, record.space, record.recipe.budget.tokens)
    search = Search(study, start, parallel, lambda: tidy(record, study))
    try:
        with storage_errors(record.folder / STUDY):
            search.run()
    except Interrupted as stopped:
        show_results(record, results_of(study), importance_of(study), launched)
        if search.signals.first == signal.SIGINT:
            tell(f"Interrupted. The same command goes on: {again}")
            raise typer.Exit(130) from stopped
        raise Interrupted(f"{stopped} The same command goes on: {again}") from stopped
    show_results(record, results_of(study), importance_of(study), launched)


def fitting_space(path: Path, recipe: Recipe) -> Space:
    """The space, whose figure the recipe's runs log.

    Raises:
        RecipeError: all mistakes.
    """
    space = load_space(path)
    refuse_unlogged_metric(space, recipe)
    if "pruner" in space.settings.model_fields_set or is_compared_on_the_way(space.settings, recipe):
        return space
    tell(
        f"No trial is ended early: `{space.settings.metric}` is measured before and after alone. With"
        " `evaluation.every_tokens` it is."
    )
    return replace(space, settings=space.settings.model_copy(update={"pruner": NO_PRUNER}))


def refuse_mistakes(space: Space, recipe: Recipe, root: Node) -> None:
    """Put the recipe, and every value at the space's ends, through the three gates.

    Raises:
        RecipeError: all mistakes, with the space's lines.
    """
    build_pruner(space.settings, recipe.budget.tokens)
    build_sampler(space, 0)
    at_ends = recipes_at_ends(space, root)
    tell(f"Checking the recipe and {len(at_ends)} values of {space.file} ...")
    found = mistakes_of({BASE: recipe, **{told: changed for told, (_, changed) in at_ends.items()}})
    if found[BASE]:
        raise RecipeError("\n".join(f"{BASE}: {mistake}" for mistake in found[BASE]))
    wrong = [
        f"{at_ends[told][0].place}: with {told}: {mistake}" for told, mistakes in found.items() for mistake in mistakes
    ]
    if wrong:
        raise RecipeError("\n".join(wrong))


def tidy(record: SearchRecord, study: Study) -> None:
    """When a trial is over: results as far as they are known, and room on the disk where that is asked for."""
    results = results_of(study)
    write_results(record, results, importance_of(study))
    if study.space.settings.keep == "best":
        remove_weights(record, results)
