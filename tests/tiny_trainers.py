"""Trainers of tiny runs in this process, with whatever goes wrong in their steps, and what their runs left behind."""

import json

import pytest
import torch
from tiny import write_recipe

from cpt.checkpoints.resume import latest_checkpoint
from cpt.data.rows.build import build_data
from cpt.errors import RestartNeeded
from cpt.models.build import build_model
from cpt.recipe.load import load_recipe
from cpt.runs.events import read_events
from cpt.stages.build import build_trainer
from cpt.tokenizer.load import load_tokenizer
from cpt.training.trainer import CPTTrainer


def trainer_of(sections, folder, *, steps=4, callbacks=(), faults=None, **changes):
    """A trainer of steps of 4 rows, whose runs are in the folder.

    Args:
        faults: (trainer, inputs, loss) -> the loss of a micro-batch; loss is None before the micro-batch.
        changes: sections of the recipe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    budget = {"tokens": steps * 256, "global_batch_tokens": 256}
    sections = {**sections, "output_dir": str(folder / "runs"), "budget": budget, **changes}
    recipe = load_recipe(write_recipe(sections, folder / "recipe.yaml"))
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=recipe.seed, evaluation=recipe.evaluation)
    model = build_model(recipe.model, tokenizer, seed=recipe.seed)
    trainer = build_trainer(recipe, model, tokenizer, data, watchers=callbacks)
    trainer.prepared_data = data
    if faults is not None:

        def compute_loss(model, inputs, *arguments, **options):
            faults(trainer, inputs, None)
            return faults(
                trainer,
                inputs,
                CPTTrainer.compute_loss(trainer, model, inputs, *arguments, **options),
            )

        trainer.compute_loss = compute_loss
    return trainer


def saved_run(sections, folder, **checkpoints):
    """A run of four steps, saved at each unless `checkpoints` says otherwise."""
    return trainer_of(sections, folder, checkpoints={"every_steps": 1, **checkpoints})


def train_to_the_end(make, *, restarts):
    """Train in a new trainer after each restart, as `cpt train` does in a new process."""
    for _ in range(restarts):
        trainer = make()
        with pytest.raises(RestartNeeded):
            trainer.train(resume_from_checkpoint=latest_checkpoint(trainer.run_folder))
    trainer = make()
    trainer.train(resume_from_checkpoint=latest_checkpoint(trainer.run_folder))
    return trainer


def at_steps(*steps, change):
    """A fault at these steps: `change` of the loss, or an error that it raises."""

    def fault(trainer, inputs, loss):
        due = trainer.state.global_step + 1 in steps
        return change(loss) if due and loss is not None else loss

    return fault


def in_rows(*numbers):
    """A loss that is NaN where one of these rows is read."""

    def fault(trainer, inputs, loss):
        bad = [trainer.rows[number]["input_ids"] for number in numbers]
        hit = any(torch.equal(row, other) for row in inputs["input_ids"] for other in bad)
        return loss * float("nan") if hit and loss is not None else loss

    return fault


def losses(trainer):
    """By the step's number."""
    return {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def events(trainer, *kinds):
    """(kind, step) of the events of these kinds, or of all."""
    found = [(event["kind"], event["step"]) for event in read_events(trainer.run_folder)]
    return [event for event in found if not kinds or event[0] in kinds]


def metrics(trainer, name="metrics.jsonl"):
    return [json.loads(line) for line in (trainer.run_folder / name).read_text().splitlines()]


def published(trainer):
    return sorted(
        path.name
        for path in trainer.run_folder.iterdir()
        if path.is_dir() and path.name != "stacks"
    )
