"""The whole run on one screen: `accelerate launch cpt/train.py recipes/demo.yaml`, `torchrun`, `deepspeed` or `cpt
train`."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

if not __package__:  # started as a file: import from the repository root, not from inside cpt/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from cpt.command_line import run_command  # first: it keeps libraries quiet that the others import

# isort: split
from cpt.checkpoints.resume import Wanted, choose_checkpoint
from cpt.errors import RecipeError
from cpt.evaluation.verdict import verdict_of_run, write_verdict
from cpt.export.export import export_average, export_model
from cpt.launch.nodes import compare_nodes
from cpt.launch.processes import join_processes, start_deepspeed
from cpt.planning.automatic import with_chosen_values
from cpt.planning.check_model import refuse_unreachable_model
from cpt.planning.findings import placed
from cpt.planning.gate import refuse_mistakes
from cpt.ranks import is_main_process, tell
from cpt.recipe.schema import Recipe
from cpt.recipe.tree import Node
from cpt.runs.record import start_run
from cpt.stages.build import build_trainer
from cpt.stages.model import model_for
from cpt.tokenizer.load import load_tokenizer
from cpt.training.arguments import training_arguments
from cpt.training.failures import lost_ranks_named, saved_on_errors
from cpt.training.group_timeouts import GroupTimeouts
from cpt.training.heartbeat import Heartbeat
from cpt.training.inputs import data_of, describe_inputs
from cpt.training.preemption import Preemption
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


if __name__ == "__main__":
    from cpt.commands.train import command

    run_command(command)
