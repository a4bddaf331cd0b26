import math

import pytest
import torch
from tiny_faults import STEPS, at_steps, events, losses, same, trainer_of, weights
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from cpt.safety.loss_guard import LossGuard
from cpt.stages.steps.guarded import LastWord

SKIPPED = ("nan_skipped", "spike_skipped")


class WeightsAt(TrainerCallback):
    """Keeps the weights after each step."""

    def __init__(self):
        self.after = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after[state.global_step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(
    ("change", "kind"),
    [(lambda loss: loss * math.nan, "nan_skipped"), (lambda loss: loss * 1e4, "spike_skipped")],
    ids=["nan", "spike"],
)
def test_a_bad_step_changes_no_weight_and_the_next_one_goes_on(tiny_recipe, tmp_path, optimizer, change, kind):
    """With AdamW the kernel looks at a flag; SGD has no such kernel, so the host leaves its step out."""
    watcher = WeightsAt()
    settings = {"optimizer": {"name": optimizer, "learning_rate": 3e-3}}
    trainer = trainer_of(tiny_recipe, tmp_path, callbacks=[watcher], faults=at_steps(9, change=change), **settings)
    trainer.train()
    assert events(trainer, *SKIPPED) == [(kind, 9)]
    assert same(watcher.after[9], watcher.after[8]) and not same(watcher.after[10], watcher.after[9])
    found = losses(trainer)
    assert len(found) == STEPS and all(math.isfinite(loss) for step, loss in found.items() if step != 9)
    assert not math.isfinite(found[9]) or found[9] > 1e4, "it is logged as what it was"


@pytest.mark.slow
def test_the_schedule_and_the_rows_go_on_over_a_skipped_step(tiny_recipe, tmp_path):
    reference = trainer_of(tiny_recipe, tmp_path / "reference")
    trainer = trainer_of(tiny_recipe, tmp_path / "skips", faults=at_steps(9, change=lambda loss: loss * math.nan))
    for one in (reference, trainer):
        one.train()
    rates = [
        [line["learning_rate"] for line in one.state.log_history if "loss" in line] for one in (reference, trainer)
    ]
    assert rates[0] == rates[1]
    assert losses(trainer)[STEPS] == pytest.approx(losses(reference)[STEPS], rel=0.05)


def test_a_spike_of_the_gradient_alone_is_skipped(tiny_recipe, tmp_path):
    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(context, loss):
            return loss.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient * 1e5

    trainer = trainer_of(tiny_recipe, tmp_path, faults=at_steps(9, change=Steep.apply))
    trainer.train()
    assert events(trainer, *SKIPPED) == [("spike_skipped", 9)]


@pytest.mark.parametrize("value", [math.nan, 1e6])
def test_gradients_that_a_callback_spoils_at_the_last_moment_are_seen(tiny_recipe, tmp_path, value):
    class Spoiler(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            if state.global_step + 1 == 9:
                next(model.parameters()).grad.data.fill_(value)

    trainer = trainer_of(tiny_recipe, tmp_path, callbacks=[Spoiler()])
    trainer.add_callback(Spoiler())
    trainer.train()
    assert [step for _, step in events(trainer, *SKIPPED)] == [9]
    assert all(tensor.isfinite().all() for tensor in trainer.model.state_dict().values())


def test_a_healthy_run_is_the_same_with_and_without_the_guard(tiny_recipe, tmp_path):
    guarded = trainer_of(tiny_recipe, tmp_path / "guarded")
    free = trainer_of(tiny_recipe, tmp_path / "free", safety={"loss_guard": None})
    for trainer in (guarded, free):
        trainer.train()
    assert same(weights(guarded), weights(free)) and losses(guarded) == losses(free)
    assert not events(guarded, *SKIPPED) and guarded.guard is not None and free.guard is None


def test_without_the_guard_nothing_is_skipped(tiny_recipe, tmp_path):
    trainer = trainer_of(
        tiny_recipe, tmp_path, faults=at_steps(9, change=lambda loss: loss * 1e4), safety={"loss_guard": None}
    )
    trainer.train()
    assert not events(trainer, *SKIPPED) and losses(trainer)[9] > 1e4


@pytest.mark.slow
def test_the_mean_of_several_steps_is_that_of_the_steps_that_counted(tiny_recipe, tmp_path):
    training = {**tiny_recipe["training"], "logging_steps": 4}
    each = trainer_of(tiny_recipe, tmp_path / "each", faults=at_steps(9, change=lambda loss: loss * math.nan))
    fourth = trainer_of(
        tiny_recipe, tmp_path / "fourth", faults=at_steps(9, change=lambda loss: loss * math.nan), training=training
    )
    for trainer in (each, fourth):
        trainer.train()
    found = losses(each)
    assert losses(fourth)[12] == pytest.approx(sum(found[step] for step in (10, 11, 12)) / 3)
    assert losses(fourth)[16] == pytest.approx(sum(found[step] for step in (13, 14, 15, 16)) / 4)
    assert [line["skipped_steps"] for line in fourth.state.log_history if "skipped_steps" in line] == [1]


class AsksOfTheDevice(TorchDispatchMode):
    """Counts how often the host asks for the value of a tensor."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += "_local_scalar_dense" in str(function)
        return function(*arguments, **(options or {}))


class GuardOfAGpu(LossGuard):
    """On the CPU numpy judges."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.on_host = None


def test_the_guard_makes_no_step_wait_for_the_device(tiny_recipe, tmp_path, monkeypatch):
    """A GPU cannot be asked here; what the host would have to wait for can be counted all the same."""
    monkeypatch.setattr("cpt.stages.steps.guarded.LossGuard", GuardOfAGpu)
    counts = []
    for name, safety in (("guarded", {}), ("free", {"loss_guard": None})):
        training = {**tiny_recipe["training"], "logging_steps": 100}
        trainer = trainer_of(tiny_recipe, tmp_path / name, safety=safety, training=training)
        trainer._save_checkpoint = lambda *_: None
        with AsksOfTheDevice() as asks:
            trainer.train()
        counts.append(asks.count)
    assert counts[0] == counts[1], "asked with the guard, and without it"


@pytest.mark.slow
def test_a_second_training_judges_each_step_once(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path)
    trainer.train()
    trainer.train()
    assert sum(isinstance(callback, LastWord) for callback in trainer.callback_handler.callbacks) == 1
    assert int(trainer.guard.accepted) == STEPS
