"""`cpt train RECIPE`; also the program that `accelerate launch`, `torchrun` and `deepspeed` start."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from cpt.checkpoints.resume import wanted_checkpoint
from cpt.command_line import (
    Launcher,
    Lora,
    Overrides,
    Processes,
    RecipePath,
    Supervise,
    hide_transformers_bars,
    refuse_ignored,
    show_log,
)
from cpt.distributed import join_processes, leave_processes, num_nodes, world_size
from cpt.errors import RecipeError, RestartNeeded
from cpt.launch.supervise import BY_THE_LAUNCHER, MOST_RESTARTS, supervise_run
from cpt.recipe.load import load_with_tree
from cpt.recipe.schema import Recipe
from cpt.recipe.tree import Node
from cpt.runs.record import Run


def command(
    recipe: RecipePath,
    overrides: Overrides = None,
    lora: Lora = False,
    new: Annotated[
        bool, typer.Option("--new", help="Start another run of the same name (appends -2).")
    ] = False,
    supervise: Supervise = False,
    processes: Processes = 1,
    launcher: Launcher = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="With --supervise: most restarts per hour.")
    ] = MOST_RESTARTS,
    change: Annotated[
        bool, typer.Option("--change", help="Apply an edited recipe from the last checkpoint on.")
    ] = False,
    note: Annotated[
        str | None, typer.Option(help="The reason for a change, for the run's history.")
    ] = None,
    from_checkpoint: Annotated[
        Path | None,
        typer.Option(help="Begin a new run from a checkpoint of another, with its optimizer."),
    ] = None,
    resume: Annotated[
        str, typer.Option(help="latest, none (start over), or a checkpoint folder.")
    ] = "latest",
    allow_restart: Annotated[
        bool, typer.Option("--allow-restart", help="Start over if checkpoints are bad.")
    ] = False,
    trust_checkpoint: Annotated[
        bool, typer.Option("--trust-checkpoint", help="Trust the saved pickles.")
    ] = False,
    local_rank: Annotated[
        int | None, typer.Option("--local_rank", hidden=True, help="Set by DeepSpeed.")
    ] = None,
) -> None:
    """Run a recipe.

    `key.path=value` changes any key of the recipe. An interrupted run of that name resumes from its newest checkpoint;
    for a finished run, the model's folder is printed.

    If you edited the recipe of a started run, keys that cannot change the result are applied; others need --change.

    `accelerate launch`, `torchrun` and `deepspeed` start the same program: cpt/train.py.

    Example: cpt train recipe.yaml budget.tokens=10_000_000 name=first-try
    """
    show_log()
    refuse_ignored(
        {"--restarts": restarts != MOST_RESTARTS and not supervise}, "without --supervise"
    )
    refuse_ignored({"--processes": processes > 1 and launcher is not None}, BY_THE_LAUNCHER)
    if from_checkpoint is not None and (new or resume != "latest"):
        raise RecipeError(
            "--from-checkpoint names the checkpoint and starts a new run: remove --new and --resume."
        )
    loaded, root = load_with_tree(recipe, overrides or (), lora=lora)
    checkpoint = wanted_checkpoint(resume)

    # Imported after the recipe is loaded: they import torch, which takes seconds.
    import torch

    from cpt.commands.verdict import print_verdict
    from cpt.evaluation.evaluate import needs_verdict
    from cpt.training.changes import RecipeChanges
    from cpt.training.restart import restart

    hide_transformers_bars()
    flags = {
        "--lora": lora,
        "--allow-restart": allow_restart,
        "--trust-checkpoint": trust_checkpoint,
        "--change": change,
    }
    # The same command, for the processes of a supervisor and for a restart.
    arguments = [
        str(recipe),
        *(overrides or ()),
        *(name for name, is_set in flags.items() if is_set),
    ]
    if note is not None:
        arguments += ["--note", note]
    if from_checkpoint is not None:
        arguments += ["--from-checkpoint", str(from_checkpoint)]

    def confirm(changes: str) -> bool:
        arguments.append("--change")  # for the processes that a supervisor starts
        return typer.confirm(f"{changes}\nApply?")

    accept: Callable[[str], bool] | bool = change
    is_on_terminal = world_size() == 1 and sys.stdin.isatty() and sys.stdout.isatty()
    if is_on_terminal and not change:
        accept = confirm
    if supervise or processes > 1 or launcher is not None:
        arguments += ["--resume", resume]
        supervise_run(
            loaded,
            arguments,
            check=RecipeChanges(loaded, accept, note, from_checkpoint, checkpoint).check,
            new=new,
            processes=processes,
            launcher=launcher,
            restarts=restarts if supervise else None,
        )
        return
    names: list[str] = []
    try:
        final = check_and_train(
            loaded,
            root,
            new=new,
            change=accept,
            note=note,
            from_checkpoint=from_checkpoint,
            resume=checkpoint,
            allow_restart=allow_restart,
            trust_checkpoint=trust_checkpoint,
            ready=lambda trainer: names.append(trainer.run_folder.name),
        )
    except RestartNeeded as problem:
        restart(problem, [*arguments, *(f"name={name}" for name in names)])
    run = Run(final.parent)
    # GPUs of this machine that the run used
    gpus = max(1, min(torch.cuda.device_count(), world_size() // num_nodes()))
    verdict = ["cpt.commands.verdict", str(run.folder), "--processes", str(gpus)]
    leave_processes(then=verdict if needs_verdict(run) else ())
    if needs_verdict(run):
        print_verdict(run)


def check_and_train(
    recipe: Recipe, root: Node | None = None, *, new: bool = False, **options: Any
) -> Path:
    """Check the recipe, replace each `auto` by a value, record both recipes and the plan, and train.

    Args:
        root: the recipe's tree of `load_with_tree`, for the lines of mistakes.
        options: those of `cpt.train.train`.

    Raises:
        CptError: lists all mistakes.
    """
    from cpt.launch.nodes import compare_nodes
    from cpt.planning.check_model import refuse_unreachable_model
    from cpt.planning.check_resources import placed
    from cpt.train import train

    join_processes(recipe.training)
    compare_nodes(recipe)
    refuse_unreachable_model(recipe)
    try:
        return train(recipe, new=new, check=True, places=root, **options)
    except RecipeError as problem:
        message = placed(str(problem), root)
        if message == str(problem):
            raise
        raise RecipeError(message) from problem
