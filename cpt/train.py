"""The whole run on one screen: `accelerate launch cpt/train.py recipes/demo.yaml`, `torchrun`, `deepspeed` or `cpt train`."""

import sys
from pathlib import Path
from typing import Annotated

if not __package__:  # started as a file: import from the repository root, not from inside cpt/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import typer
from transformers.utils.logging import disable_progress_bar

from cpt.checkpoints.average import export_average
from cpt.checkpoints.export import export_model
from cpt.checkpoints.resume import latest_checkpoint
from cpt.command_line import run_command, show_log
from cpt.data.build import build_data
from cpt.errors import RecipeError
from cpt.evaluation.verdict_page import PAGE, write_verdict
from cpt.launchers.processes import join_processes, leave_processes, start_deepspeed
from cpt.models.build import build_model
from cpt.preflight.gate import placed, refuse_mistakes
from cpt.ranks import is_main_process, tell
from cpt.recipe.load import load_with_places
from cpt.recipe.schema import Recipe
from cpt.recipe.tree import Node
from cpt.runs.record import start_run
from cpt.stages.arguments import training_arguments, weights_dtype
from cpt.stages.build import build_trainer
from cpt.stages.data_position import restore_position
from cpt.stages.inputs import describe_inputs
from cpt.tokenizer.load import load_tokenizer


def train(recipe: Recipe, *, new: bool = False, root: Node | None = None) -> Path:
    """Run the recipe, going on from its newest checkpoint, and return the folder of the exported model.

    Args:
        new: start beside a run of the same name instead of going on with it.
        root: the recipe's tree (of `load_with_places`), so that mistakes are shown with their lines.

    Raises:
        CptError: one of its children, for whatever the user can mend.
    """
    launch = join_processes(recipe.training)
    try:
        run = start_run(recipe, new=new)
    except RecipeError as problem:
        raise RecipeError(placed(str(problem), root)) from problem
    if run.is_finished:
        tell(f"{run.folder} is finished: its model is in {run.export_folder}. For another run: name=... or --new.")
        return run.export_folder
    with run.reporting():
        refuse_mistakes(recipe, deepspeed=launch.deepspeed_config, root=root)
        start_deepspeed(launch)
        tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
        data = build_data(recipe.data, tokenizer, seed=recipe.seed, evaluation=recipe.evaluation, budget=recipe.budget)
        arguments = training_arguments(recipe, run.folder, data, deepspeed=launch.deepspeed_config)
        model = build_model(
            recipe.model,
            tokenizer,
            seed=recipe.seed,
            dtype=weights_dtype(recipe, arguments),
            mixed_precision=arguments.bf16 or arguments.fp16,
        )
        run.record_inputs(data.fingerprint, lambda: describe_inputs(recipe, data, tokenizer))
        trainer = build_trainer(recipe, model, tokenizer, data, arguments)
        checkpoint = latest_checkpoint(run.folder)
        if checkpoint is not None:
            restore_position(data, checkpoint)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        judged = is_main_process() and bool(data.held_out)
        verdict = write_verdict(run.folder, serve=f"cpt serve {run.export_folder}") if judged else None
        export_model(trainer, recipe, tokenizer, run.export_folder)
        export_average(recipe, tokenizer, run.folder)
    if verdict is not None:
        tell(f"{verdict.headline()} The page: {run.folder / PAGE}")
    tell(f"The model is in {run.export_folder}.")
    return run.export_folder


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter with our defaults.")] = False,
    new: Annotated[bool, typer.Option("--new", help="Start beside a run of the same name (appends -2).")] = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", hidden=True, help="DeepSpeed's launcher passes it.")] = None,
) -> None:
    """Run a recipe."""
    show_log()
    disable_progress_bar()  # of transformers, for each file it reads or writes; the run has its own
    loaded, root = load_with_places(recipe, overrides or (), lora=lora)
    train(loaded, new=new, root=root)
    leave_processes()


if __name__ == "__main__":
    run_command(command)
