"""A whole run in one file, for `accelerate launch cpt/train.py recipes/demo.yaml`, `torchrun`, `deepspeed` or `cpt
train`."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

if not __package__:  # started as a file: import from the repository root, not from cpt/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from cpt.interrupts import end_on_signals

if __name__ == "__main__":
    end_on_signals()  # also while the others are imported

# isort: split
from cpt.command_line import run_command  # first: it silences libraries that the others import

# isort: split
from cpt.checkpoints.resume import Wanted, choose_checkpoint, refuse_missing
from cpt.checkpoints.retention import archive_record
from cpt.checkpoints.save import seal_export
from cpt.data.rows.build import data_of
from cpt.data.rows.stretches import ended_stretches
from cpt.distributed import (
    is_main_process,
    join_processes,
    main_process_decides,
    print_once,
    start_deepspeed,
)
from cpt.evaluation.verdict import verdict_of_run, write_verdict
from cpt.export.export import export_average, export_model
from cpt.planning.fitting import with_chosen_values
from cpt.planning.gate import refuse_mistakes
from cpt.recipe.keys import refuse_automatic
from cpt.recipe.schema import Recipe
from cpt.recipe.tree import Node
from cpt.runs.folder import BEGAN
from cpt.runs.record import Run, record_export, start_run
from cpt.stages.build import build_trainer
from cpt.stages.models import model_for
from cpt.tokenizer.load import load_tokenizer
from cpt.training.arguments import limit_gpu_memory, training_arguments
from cpt.training.changes import EndOfPart, RecipeChanges
from cpt.training.first_batch import with_fallbacks
from cpt.training.inputs import describe_inputs
from cpt.training.liveness import GroupTimeouts, Heartbeat, lost_ranks_named
from cpt.training.preemption import Preemption
from cpt.training.resuming import (
    comparison_of,
    keep_dtype,
    keep_global_batch,
    saved_on_errors,
    train_from,
)
from cpt.training.trainer import CPTTrainer


def train(
    recipe: Recipe,
    *,
    new: bool = False,
    change: bool | Callable[[str], bool] = False,
    note: str | None = None,
    from_checkpoint: Path | None = None,
    resume: Wanted = "latest",
    allow_restart: bool = False,
    trust_checkpoint: bool = False,
    check: bool = False,
    places: Node | None = None,
    ready: Callable[[CPTTrainer], None] | None = None,
) -> Path:
    """Run the recipe, resuming from its newest valid checkpoint, and return the folder of the exported model.

    Args:
        new: start a new run if the name is taken, instead of resuming that run.
        change: apply changes of the recipe that hold from the run's last checkpoint on; refused without it. Or a
            function that is called with their description, and returns whether to apply them.
        note: the reason, for the run's history.
        from_checkpoint: begin this new run from the checkpoint of another, with its optimizer and data position.
        resume: `latest`, `none` to start from the beginning, or the checkpoint to resume from.
        allow_restart: start from the beginning if no checkpoint is valid.
        trust_checkpoint: trust the pickles of a checkpoint without a manifest from cpt.
        check: choose a value for each `auto`, refuse mistakes before they cost anything, and record the plan, as
            `cpt train` does. From Python, `resolve_recipe` chooses the values.
        places: the recipe's tree (of `load_with_tree`), for the lines of mistakes.
        ready: called with the trainer when all is built, before its first step.

    Raises:
        CptError: a subclass, for errors that the user can fix. RecipeError: a key is still `auto`.
        RestartNeeded: call it again in a new process, as `cpt train` does: the run needs a smaller micro-batch, or has
            to skip rows.
    """
    launch = join_processes(recipe.training)
    if isinstance(resume, Path):
        refuse_missing(resume)
    changes = RecipeChanges(
        recipe, accept=change, note=note, branch_of=from_checkpoint, resume=resume
    )
    run = start_run(recipe, check=changes.check, new=new)
    if from_checkpoint is not None and not (run.folder / BEGAN).exists():
        resume = from_checkpoint
    if run.is_done and resume == "latest":
        print_once(
            f"{run.folder} is finished: its model is in {run.export_folder}. For another run: name=... or --new."
        )
        return run.export_folder
    with (
        Preemption() as preemption,
        run.reporting(preemption.record_with),
        Heartbeat(run.folder) as heartbeat,
        lost_ranks_named(run),
    ):
        point = choose_checkpoint(
            run.folder, resume=resume, allow_restart=allow_restart, trust=trust_checkpoint
        )
        part = main_process_decides(lambda: changes.part(run, point))
        inputs = main_process_decides(lambda: changes.inputs(run, point, part.recipe))
        recipe = main_process_decides(lambda: with_fallbacks(part.recipe, run.folder))
        recipe = inputs.pinned(recipe)
        if check:
            recipe = with_chosen_values(recipe, deepspeed=launch.deepspeed_config)
            plan = refuse_mistakes(recipe, deepspeed=launch.deepspeed_config, root=places).plan
            run.record_plan(plan, recipe)
        recipe = refuse_automatic(recipe)
        recipe = main_process_decides(lambda: inputs.pinned(recipe, from_cache=True))
        start_deepspeed(launch)
        recipe = keep_dtype(
            keep_global_batch(recipe, point), point, deepspeed=launch.deepspeed_config is not None
        )
        tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
        data = data_of(
            recipe, tokenizer, ended_stretches(part.stretches), comparison=comparison_of(point)
        )
        arguments = training_arguments(recipe, run.folder, data, deepspeed=launch.deepspeed_config)
        limit_gpu_memory(recipe.safety.max_gpu_memory, arguments)
        model = model_for(recipe, tokenizer, arguments)
        main_process_decides(lambda: changes.record(run))
        main_process_decides(lambda: inputs.refuse_changed_sets(data.held_out_files))
        run.record_inputs(
            inputs.recorded,
            data.fingerprint,
            partial(describe_inputs, inputs, recipe, data, tokenizer, arguments),
            stretch=len(part.stretches),
            renew=changes.are_new or inputs.is_renewed,
        )
        end = EndOfPart(part.end)
        trainer = build_trainer(
            recipe,
            model,
            tokenizer,
            data,
            arguments,
            watchers=(heartbeat, preemption, GroupTimeouts(), end),
        )
        if ready is not None:
            ready(trainer)
        with saved_on_errors(trainer):
            train_from(trainer, point)
        preemption.end_training(run.status().get("checkpoint"))
        end.restart_at_end()
        if is_main_process() and (data.held_out or recipe.evaluation.tasks):
            # The run's own measurements; `print_verdict` adds the rest.
            write_verdict(
                run.folder, verdict_of_run(run.folder, serve=f"cpt serve {run.export_folder}")
            )
        export_model(
            trainer,
            recipe,
            tokenizer,
            run.export_folder,
            seal=partial(seal_export, manifest=trainer.manifest("weights")),
        )
        record_export(run.folder)
        export_average(recipe, tokenizer, run.folder)
    archive_record(run.folder, recipe.checkpoints.archive)
    print_once(describe_result(run))
    return run.export_folder


def describe_result(run: Run) -> str:
    text = f"The model is in {run.export_folder}."
    skipped, steps = run.skipped_share()
    if skipped:
        text += f" {skipped:,} of {steps:,} steps were skipped."
    return text


if __name__ == "__main__":
    from cpt.commands.train import command

    run_command(command)
