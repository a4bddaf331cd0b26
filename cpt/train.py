"""The whole run on one screen: `accelerate launch cpt/train.py recipes/demo.yaml`, `torchrun`, `deepspeed` or `cpt
train`."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

if not __package__:  # started as a file: import from the repository root, not from inside cpt/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from cpt.command_line import (
    refuse_ignored,
    run_command,
    show_log,
)  # first: it keeps libraries quiet that the others import

# isort: split
import typer
from transformers.utils.logging import disable_progress_bar

from cpt.checkpoints.resume import Wanted, choose_checkpoint, wanted_checkpoint
from cpt.commands.verdict import judge
from cpt.errors import RecipeError, RestartNeeded
from cpt.evaluation.after_training import needs_judging
from cpt.evaluation.verdict import verdict_of_run, write_verdict
from cpt.export.average import export_average
from cpt.export.export import export_model
from cpt.launch.attempts import BY_THE_LAUNCHER, MOST_RESTARTS
from cpt.launch.nodes import compare_nodes
from cpt.launch.processes import join_processes, leave_processes, start_deepspeed
from cpt.launch.supervise import supervise_run
from cpt.planning.automatic import with_chosen_values
from cpt.planning.check_model import refuse_unreachable_model
from cpt.planning.findings import placed
from cpt.planning.gate import refuse_mistakes
from cpt.ranks import is_main_process, tell
from cpt.recipe.load import load_with_places
from cpt.recipe.schema import Recipe
from cpt.recipe.tree import Node
from cpt.runs.record import Run, start_run
from cpt.stages.build import build_trainer
from cpt.stages.model import model_for
from cpt.tokenizer.load import load_tokenizer
from cpt.training.arguments import training_arguments
from cpt.training.failures import lost_ranks_named, saved_on_errors
from cpt.training.group_timeouts import GroupTimeouts
from cpt.training.heartbeat import Heartbeat
from cpt.training.inputs import data_of, describe_inputs
from cpt.training.preemption import Preemption
from cpt.training.restart import restart
from cpt.training.resuming import keep_dtype, keep_global_batch, train_from
from cpt.training.saving import seal_export
from cpt.training.trainer import CPTTrainer


def train(
    recipe: Recipe,
    *,
    new: bool = False,
    root: Node | None = None,
    resume: Wanted = "latest",
    allow_restart: bool = False,
    trust_checkpoint: bool = False,
    ready: Callable[[CPTTrainer], None] | None = None,
) -> Path:
    """Run the recipe, resuming from its newest sound checkpoint, and return the folder of the exported model.

    Args:
        new: start beside a run of the same name instead of going on with it.
        root: the recipe's tree (of `load_with_places`), so that mistakes are shown with their lines.
        resume: `latest`, `none` to begin anew, or the checkpoint to go on from.
        allow_restart: begin anew where no checkpoint is sound.
        trust_checkpoint: the user vouches for the pickles of a checkpoint without our manifest.
        ready: called with the trainer when all is built, before its first step.

    Raises:
        CptError: one of its children, for whatever the user can fix.
        RestartNeeded: call it again in a new process, as `cpt train` does: the run learned a micro-batch that fits, or
            rows to leave out.
    """
    launch = join_processes(recipe.training)
    compare_nodes(recipe)
    refuse_unreachable_model(recipe)
    try:
        run = start_run(recipe, new=new)
    except RecipeError as problem:
        raise RecipeError(placed(str(problem), root)) from problem
    if run.is_finished and resume == "latest":
        tell(f"{run.folder} is finished: its model is in {run.export_folder}. For another run: name=... or --new.")
        return run.export_folder
    with run.reporting(), Preemption() as preemption, Heartbeat(run.folder) as heartbeat, lost_ranks_named(run):
        recipe = with_chosen_values(recipe, deepspeed=launch.deepspeed_config)
        run.record_plan(refuse_mistakes(recipe, deepspeed=launch.deepspeed_config, root=root))
        start_deepspeed(launch)
        point = choose_checkpoint(run.folder, resume=resume, allow_restart=allow_restart, trust=trust_checkpoint)
        recipe = keep_dtype(keep_global_batch(recipe, point), point, deepspeed=launch.deepspeed_config is not None)
        tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
        data = data_of(recipe, tokenizer)
        arguments = training_arguments(recipe, run.folder, data, deepspeed=launch.deepspeed_config)
        model = model_for(recipe, tokenizer, arguments)
        run.record_inputs(data.fingerprint, lambda: describe_inputs(recipe, data, tokenizer, arguments))
        trainer = build_trainer(
            recipe, model, tokenizer, data, arguments, watchers=(heartbeat, preemption, GroupTimeouts())
        )
        if ready is not None:
            ready(trainer)
        with saved_on_errors(trainer):
            train_from(trainer, data, point)
        preemption.raise_if_stopped(run.status().get("checkpoint"))
        if is_main_process() and (data.held_out or recipe.evaluation.tasks):
            # What the run itself measured; `judge` adds the rest.
            write_verdict(run.folder, verdict_of_run(run.folder, serve=f"cpt serve {run.export_folder}"))
        export_model(trainer, recipe, tokenizer, run.export_folder, seal=partial(seal_export, trainer))
        export_average(recipe, tokenizer, run.folder)
    skipped, steps = run.skipped_share()
    tell(f"The model is in {run.export_folder}.{f' {skipped:,} of {steps:,} steps were skipped.' if skipped else ''}")
    return run.export_folder


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter with our defaults.")] = False,
    new: Annotated[bool, typer.Option("--new", help="Start beside a run of the same name (appends -2).")] = False,
    supervise: Annotated[
        bool, typer.Option("--supervise", help="Watch the run, and start it again where it ends too early.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="Processes to start on this machine, one per GPU.")] = 1,
    launcher: Annotated[
        str | None, typer.Option(help='Or the launcher that starts them, such as "accelerate launch".')
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="With --supervise: give up after so many restarts in an hour.")
    ] = MOST_RESTARTS,
    resume: Annotated[
        str, typer.Option("--resume", help="latest, none (begin anew), or a checkpoint's folder.")
    ] = "latest",
    allow_restart: Annotated[
        bool, typer.Option("--allow-restart", help="Begin anew where no checkpoint is sound.")
    ] = False,
    trust_checkpoint: Annotated[
        bool, typer.Option("--trust-checkpoint", help="Read pickles that nothing vouches for but you.")
    ] = False,
    local_rank: Annotated[
        int | None, typer.Option("--local_rank", hidden=True, help="DeepSpeed's launcher passes it.")
    ] = None,
) -> None:
    """Run a recipe.

    `key.path=value` changes any key of the recipe. An interrupted run of that name resumes from its newest checkpoint;
    of a finished one the model's folder is printed.

    `accelerate launch`, `torchrun` and `deepspeed` start the same program: cpt/train.py.

    Example: cpt train recipe.yaml budget.tokens=10_000_000 name=first-try
    """
    show_log()
    disable_progress_bar()  # of transformers, for each file it reads or writes; the run has its own
    refuse_ignored({"--restarts": restarts != MOST_RESTARTS and not supervise}, "without --supervise")
    refuse_ignored({"--processes": processes > 1 and launcher is not None}, BY_THE_LAUNCHER)
    loaded, root = load_with_places(recipe, overrides or (), lora=lora)
    if supervise or processes > 1 or launcher is not None:
        options = {"--lora": lora, "--allow-restart": allow_restart, "--trust-checkpoint": trust_checkpoint}
        words = [
            str(recipe),
            *(overrides or ()),
            *(name for name, given in options.items() if given),
            "--resume",
            resume,
        ]
        supervise_run(
            loaded, words, new=new, processes=processes, launcher=launcher, restarts=restarts if supervise else None
        )
        return
    wanted = wanted_checkpoint(resume)
    names: list[str] = []
    try:
        final = train(
            loaded,
            new=new,
            root=root,
            resume=wanted,
            allow_restart=allow_restart,
            trust_checkpoint=trust_checkpoint,
            ready=lambda trainer: names.append(trainer.run_folder.name),
        )
    except RestartNeeded as problem:
        given = {"--lora": lora, "--trust-checkpoint": trust_checkpoint}
        flags = [flag for flag, is_given in given.items() if is_given]
        restart(problem, [str(recipe), *(overrides or ()), *(f"name={name}" for name in names), *flags])
    run = Run(final.parent)
    leave_processes(then=["cpt.commands.verdict", str(run.folder)] if needs_judging(run) else ())
    if needs_judging(run):
        judge(run)


if __name__ == "__main__":
    run_command(command)
