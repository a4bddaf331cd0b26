"""What a signal does to an evaluation that is due or under way, and that the next start makes it up without touching
the training."""

import json
import signal

import pytest
import torch
from tiny import TINY_LLAMA, write_recipe
from transformers import TrainerCallback

from cpt.checkpoints.resume import published_checkpoints
from cpt.data.rows.build import build_data
from cpt.models.build import build_model
from cpt.recipe.load import load_recipe
from cpt.stages.build import build_trainer
from cpt.tokenizer.load import load_tokenizer
from cpt.training.preemption import Preemption

OF_THE_CLOCK = ("tokens_per_second", "data_wait", "seconds_to_go", "step_seconds_", "train_")
OF_THE_MACHINE = ("host_memory_gib", "cpu_percent")


class Signal(TrainerCallback):
    """Arrives in this step, or after so many batches of its evaluation."""

    def __init__(self, preemption, step, batch=None):
        self.preemption, self.step, self.batch, self.batches = preemption, step, batch, 0

    def on_step_begin(self, args, state, control, **_):
        if self.batch is None and state.global_step + 1 == self.step:
            self.preemption.received = signal.SIGTERM

    def on_prediction_step(self, args, state, control, **_):
        self.batches += state.global_step == self.step
        if self.batches == self.batch:
            self.preemption.received = signal.SIGTERM


@pytest.fixture
def start(tiny_recipe, tmp_path, corpus):
    """One start of a run of 8 steps that evaluates at each second one; the checkpoint that it ended with, and whether
    it was stopped."""
    tiny_recipe["model"]["config"] = {**TINY_LLAMA, "attention_dropout": 0.1}
    tiny_recipe["evaluation"] = {
        "perplexity": [{"path": str(corpus / "held_out.jsonl")}],
        "every_steps": 2,
        "prompts": ["the model"],
    }
    tiny_recipe["training"]["per_device_eval_batch_size"] = 1

    def run(name, *, stop_at=None, batch=None, **sections):
        recipe = load_recipe(write_recipe({**tiny_recipe, "name": name, **sections}, tmp_path / f"{name}.yaml"))
        tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
        data = build_data(recipe.data, tokenizer, seed=recipe.seed, evaluation=recipe.evaluation)
        preemption = Preemption()
        watchers = (Signal(preemption, stop_at, batch), preemption)
        trainer = build_trainer(
            recipe, build_model(recipe.model, tokenizer, seed=recipe.seed), tokenizer, data, watchers=watchers
        )
        known = published_checkpoints(trainer.run_folder) if trainer.run_folder.exists() else []
        trainer.train(known[-1] if known else None)
        return trainer, preemption.stopped_by is not None

    return run


def lines(trainer, name="metrics.jsonl"):
    """Without what a clock or a look at the machine measured."""
    told = [json.loads(line) for line in (trainer.run_folder / name).read_text().splitlines()]
    measured = (*OF_THE_CLOCK, *OF_THE_MACHINE)
    return [
        {key: value for key, value in line.items() if not key.startswith(measured)}
        for line in told
        if "train_runtime" not in line
    ]


def evaluated(trainer):
    return [line["step"] for line in lines(trainer) if "eval_held_out_loss" in line]


LONG = [pytest.param(*case, marks=pytest.mark.long) for case in ((4, None), (8, None), (3, None))]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "batch"), [(4, 2), (8, 1), *LONG])
def test_an_evaluation_that_a_signal_stopped_is_made_up_and_nothing_else_changes(start, step, batch):
    straight, _ = start("straight")
    stopped, was_stopped = start("stopped", stop_at=step, batch=batch)
    assert was_stopped and [path.name for path in published_checkpoints(stopped.run_folder)] == [f"checkpoint-{step}"]
    assert step not in evaluated(stopped), "whoever sent the signal does not wait for it"
    assert [line["step"] for line in lines(stopped, "samples.jsonl")] == [0]
    resumed, _ = start("stopped")
    assert lines(resumed) == lines(straight)
    assert evaluated(resumed) == [0, 2, 4, 6, 8]
    assert lines(resumed, "samples.jsonl") == lines(straight, "samples.jsonl")
    weights, expected = resumed.model.state_dict(), straight.model.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_an_evaluation_is_made_up_once_and_a_signal_in_it_leaves_it_to_the_next_start(start):
    start("run", stop_at=4)
    again, was_stopped = start("run", stop_at=4, batch=1)
    assert was_stopped and again.state.global_step == 4 and evaluated(again) == [0, 2]
    at_last, was_stopped = start("run", stop_at=5)  # whose checkpoint is of a step that is not evaluated
    assert was_stopped and evaluated(at_last) == [0, 2, 4]
    finished, _ = start("run")
    assert evaluated(finished) == [0, 2, 4, 6, 8]


def test_a_signal_before_the_first_step_leaves_nothing_to_go_on_from(start):
    stopped, was_stopped = start("run", stop_at=0, batch=1)
    assert was_stopped and stopped.state.global_step == 0 and published_checkpoints(stopped.run_folder) == []
    assert lines(stopped, "samples.jsonl") == [] if (stopped.run_folder / "samples.jsonl").exists() else True
    again, _ = start("run")
    assert evaluated(again) == [0, 2, 4, 6, 8]
