"""Train two steps, save them as the Trainer does, as we do, and as we do in the background, and write down what
differs: `... RECIPE OUTPUT`."""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
from resuming import differences
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from cpt.data.rows.build import build_data
from cpt.distributed import is_main_process, join_processes, leave_processes, start_deepspeed
from cpt.models.build import build_model
from cpt.recipe.load import load_recipe
from cpt.stages.build import build_trainer
from cpt.tokenizer.load import load_tokenizer
from cpt.training import saving
from cpt.training.arguments import training_arguments, weights_dtype

OURS_ALONE = ("manifest.json", "data_position.json", "safety.json", "training_args.bin")  # the last holds the folder


def trained(path):
    recipe = load_recipe(path)
    launch = join_processes(recipe.training)
    start_deepspeed(launch)
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=recipe.seed, budget=recipe.budget)
    arguments = training_arguments(recipe, recipe.output_dir / recipe.name, data, deepspeed=launch.deepspeed_config)
    model = build_model(
        recipe.model,
        tokenizer,
        seed=recipe.seed,
        dtype=weights_dtype(recipe, arguments),
        mixed_precision=arguments.bf16,
    )
    trainer = build_trainer(recipe, model, tokenizer, data, arguments)
    trainer.train()
    return trainer


def save(trainer, folder, way):
    folder.mkdir(parents=True, exist_ok=True)
    trainer.args.output_dir = str(folder)
    for name in ("agreement", "in_flight"):  # of the run before
        trainer.__dict__.pop(name, None)
    way()
    return Path(get_last_checkpoint(str(folder)))


def begin_behind(trainer):
    trainer.recipe = trainer.recipe.model_copy(
        update={"checkpoints": trainer.recipe.checkpoints.model_copy(update={"in_background": True})}
    )
    trainer.checkpointer.save_once("full")


def without_memory(trainer):
    """Save in the background, where copies find no memory."""
    with mock.patch.object(saving, "MOST_OF_THE_MEMORY", 0.0):
        begin_behind(trainer)
    ours = trainer.checkpointer
    assert ours.in_flight is None and ours.save_failure is None, ours.save_failure


def in_background(trainer):
    """Save, and spoil every trained number and moment as soon as an optimizer may make its step."""
    begin_behind(trainer)
    assert trainer.checkpointer.in_flight is not None
    trainer.checkpointer.wait_for_copies()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data.fill_(7)
                if "ds_tensor" in vars(parameter):  # ZeRO-3's part of it
                    parameter.ds_tensor.fill_(7)
        for group in trainer.optimizer.param_groups:  # under DeepSpeed the master weights
            for parameter in group["params"]:
                parameter.data.fill_(7)
        for state in trainer.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(7)
    trainer.checkpointer.wait_for_saves()
    assert trainer.checkpointer.save_failure is None, trainer.checkpointer.save_failure


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def differing(one, other):
    """The files of two checkpoints that are not the same."""
    return differences(one, other, ignored=OURS_ALONE)


def main():
    trainer = trained(sys.argv[1])
    output = Path(sys.argv[2])
    theirs = save(trainer, output / "theirs", lambda: Trainer._save_checkpoint(trainer, trainer.model, None))
    ways = {
        "ours": lambda: trainer.checkpointer.save_once("full"),
        "blocked": lambda: without_memory(trainer),
        "behind": lambda: in_background(trainer),
    }
    folders = {name: save(trainer, output / name, way) for name, way in ways.items()}
    if is_main_process():
        found = {name: differing(theirs, folder) for name, folder in folders.items()}
        names = {folder: files_of(folder) - {*OURS_ALONE} for folder in (theirs, *folders.values())}
        sizes = [sum((folder / name).stat().st_size for name in names[folder]) for folder in names]
        found |= {"sizes": sizes, "files": len(files_of(theirs))}
        (output / "differences.json").write_text(json.dumps(found))
    leave_processes()


if __name__ == "__main__":
    main()
