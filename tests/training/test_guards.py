import json
import math
from itertools import pairwise

import pytest
import torch
from tiny_faults import STEPS, at_steps, events, in_rows, losses, same, train_to_the_end, trainer_of, weights
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from cpt.checkpoints.resume import published_checkpoints
from cpt.errors import Interrupted, ResourceError, RestartNeeded, TrainingError
from cpt.runs.events import read_events

SKIPPED = ("nan_skipped", "spike_skipped")
BAD_ROWS = (24, 28, 32)  # of steps 7, 8 and 9
TOLERANT = {
    "checkpoints": {"every_steps": 2, "keep": None},
    "safety": {"loss_guard": {"name": "robust", "skips": 2, "rollbacks": 1}},
}
MEMORY = {"training": {"per_device_train_batch_size": 4, "logging_steps": 1}}
RELEASED = {"name": "adamw_8bit", "learning_rate": 3e-3, "rounding": "stochastic", "release_gradients": True}


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


def test_a_healthy_run_is_the_same_with_and_without_the_guard(tiny_recipe, tmp_path):
    guarded = trainer_of(tiny_recipe, tmp_path / "guarded")
    free = trainer_of(tiny_recipe, tmp_path / "free", safety={"loss_guard": None})
    for trainer in (guarded, free):
        trainer.train()
    assert same(weights(guarded), weights(free)) and losses(guarded) == losses(free)
    assert not events(guarded, *SKIPPED) and guarded.guard.loss_guard is not None and free.guard.loss_guard is None


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


def test_the_guard_makes_no_step_wait_for_the_device(tiny_recipe, tmp_path):
    counts = []
    for name, safety in (("guarded", {}), ("free", {"loss_guard": None})):
        training = {**tiny_recipe["training"], "logging_steps": 100}
        trainer = trainer_of(tiny_recipe, tmp_path / name, safety=safety, training=training)
        trainer._save_checkpoint = lambda *_: None
        with AsksOfTheDevice() as asks:
            trainer.train()
        counts.append(asks.count)
    assert counts[0] == counts[1]


# --- restarts after too many bad steps ---


def bad_run(sections, folder, rows=BAD_ROWS, **changes):
    return lambda: trainer_of(sections, folder, faults=in_rows(*rows), **{**TOLERANT, **changes})


def test_after_too_many_bad_steps_the_run_restarts_before_them_without_their_rows(tiny_recipe, tmp_path):
    back = train_to_the_end(bad_run(tiny_recipe, tmp_path / "back"), restarts=1)
    never = trainer_of(tiny_recipe, tmp_path / "never", **TOLERANT)
    never.rows_of_steps.leave_out([(24, 36)])
    never.train()
    found = read_events(back.run_folder)
    kinds = [(event["kind"], event["step"]) for event in found if event["kind"] in (*SKIPPED, "rolled_back")]
    assert kinds == [*(("nan_skipped", step) for step in (7, 8, 9)), ("rolled_back", 9)]
    assert losses(back) == losses(never) and same(weights(back), weights(never))
    assert [path.name for path in (back.run_folder / "set-aside").iterdir()] == ["checkpoint-8"]
    after = json.loads((back.run_folder / "checkpoint-8" / "safety.json").read_text())
    assert after["left_out"] == [[24, 36]] and after["budget"] == {"recent": [], "total": 3, "rollbacks": 1}
    assert json.loads((back.run_folder / "checkpoint-8" / "data_position.json").read_text())["row"] == 8 * 4 + 12


@pytest.mark.slow
@pytest.mark.parametrize("step", [6, 8, 12])
def test_resumed_after_a_roll_back_the_run_is_the_same(tiny_recipe, tmp_path, step):
    make = bad_run(tiny_recipe, tmp_path)
    straight = train_to_the_end(make, restarts=1)
    again = make()
    again.train(resume_from_checkpoint=straight.run_folder / f"checkpoint-{step}")
    assert same(weights(again), weights(straight)) and again.rows_of_steps.left_out == [(24, 36)]


@pytest.mark.slow
def test_a_run_that_begins_anew_forgets_the_roll_back(tiny_recipe, tmp_path):
    make = bad_run(tiny_recipe, tmp_path)
    train_to_the_end(make, restarts=1)
    anew = trainer_of(tiny_recipe, tmp_path, **TOLERANT)
    anew.train()
    again = trainer_of(tiny_recipe, tmp_path, **TOLERANT)
    again.train(resume_from_checkpoint=again.run_folder / "checkpoint-6")
    assert same(weights(again), weights(anew)) and not again.rows_of_steps.left_out


@pytest.mark.slow
def test_a_run_that_keeps_diverging_stops(tiny_recipe, tmp_path):
    make = bad_run(tiny_recipe, tmp_path, rows=range(24, 200, 4))
    with pytest.raises(TrainingError, match=r"steps 7, 8, 9 .*checkpoint-8"):
        train_to_the_end(make, restarts=1)


def test_without_a_checkpoint_from_before_the_run_continues(tiny_recipe, tmp_path):
    trainer = train_to_the_end(bad_run(tiny_recipe, tmp_path, checkpoints={}), restarts=0)
    (back,) = [event for event in read_events(trainer.run_folder) if event["kind"] == "rolled_back"]
    assert back["to_step"] is None and len(losses(trainer)) == STEPS and not trainer.rows_of_steps.left_out


def test_a_run_that_was_asked_to_stop_rolls_back_and_does_not_restart(tiny_recipe, tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 9

    trainer = trainer_of(tiny_recipe, tmp_path, callbacks=[Stop()], faults=in_rows(*BAD_ROWS), **TOLERANT)
    with pytest.raises(Interrupted) as stopped:
        trainer.train()
    assert not isinstance(stopped.value, RestartNeeded)
    assert published_checkpoints(trainer.run_folder)[-1].name == "checkpoint-6"


# --- restarts after out-of-memory ---


def too_large_above(limits):
    """Out of memory with more rows than limits[step], from that step on."""

    def fault(trainer, inputs, loss):
        limit = min((rows for step, rows in limits.items() if trainer.state.global_step + 1 >= step), default=99)
        if len(inputs["input_ids"]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return loss

    return fault


@pytest.mark.slow
def test_out_of_memory_the_run_restarts_with_smaller_micro_batches_and_loses_no_step(tiny_recipe, tmp_path):
    fault, trained = too_large_above({7: 2, 11: 1}), []

    def counted(trainer, inputs, loss):
        loss = fault(trainer, inputs, loss)
        if loss is not None:
            trained.append(trainer.state.global_step + 1)
        return loss

    reference = trainer_of(tiny_recipe, tmp_path / "reference", **MEMORY)
    reference.train()
    trainer = train_to_the_end(
        lambda: trainer_of(tiny_recipe, tmp_path / "small", faults=counted, **MEMORY), restarts=2
    )
    told = [(event["step"], event["micro_batch"]) for event in read_events(trainer.run_folder)]
    assert told == [(7, 2), (11, 1)] and trained == sorted(trained)
    assert losses(trainer) == pytest.approx(losses(reference), rel=1e-5)
    assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (1, 4)


@pytest.mark.slow
def test_where_one_row_is_too_much_it_says_what_helps(tiny_recipe, tmp_path):
    make = lambda: trainer_of(tiny_recipe, tmp_path, faults=too_large_above({5: 0}), **MEMORY)  # noqa: E731
    with pytest.raises(ResourceError, match="step 5 .*gradient_checkpointing"):
        train_to_the_end(make, restarts=2)


def test_a_run_may_be_told_to_end_instead(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path, faults=too_large_above({5: 2}), **MEMORY, safety={"on_oom": "abort"})
    with pytest.raises(ResourceError, match="`safety.on_oom: split_batch`"):
        trainer.train()
    assert not (trainer.run_folder / "learned.json").exists()


# --- updates in the backward pass ---


def released_trainer(sections, folder, *, releases=True, optimizer=None, **changes):
    training = {**sections["training"], "max_grad_norm": 0, "per_device_train_batch_size": 4}
    optimizer = {**(optimizer or RELEASED), "release_gradients": releases}
    model = {**sections["model"], "dtype": "bfloat16"}
    return trainer_of(sections, folder, optimizer=optimizer, training=training, model=model, **changes)


@pytest.mark.slow
def test_a_run_is_the_same_with_and_without_and_leaves_no_hooks(tiny_recipe, tmp_path):
    ordinary, released = (
        released_trainer(tiny_recipe, tmp_path / str(releases), releases=releases) for releases in (False, True)
    )
    for trainer in (ordinary, released):
        trainer.train()
    assert losses(released) == losses(ordinary) and same(weights(released), weights(ordinary))
    norms = [
        [line["grad_norm"] for line in trainer.state.log_history if "loss" in line] for trainer in (ordinary, released)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4) and min(norms[1]) > 0
    assert losses(released)[STEPS] < losses(released)[1]
    assert not any(parameter._post_accumulate_grad_hooks for parameter in released.model.parameters())


@pytest.mark.slow
def test_it_resumes_bit_for_bit_with_and_without_release(tiny_recipe, tmp_path):
    checkpoints = {"checkpoints": {"every_steps": 8, "keep": 4}}
    straight = released_trainer(tiny_recipe, tmp_path / "straight", **checkpoints)
    straight.train()
    middle = straight.run_folder / "checkpoint-8"
    for releases in (True, False):
        again = released_trainer(tiny_recipe, tmp_path / f"again {releases}", releases=releases, **checkpoints)
        again.train(resume_from_checkpoint=middle)
        assert same(weights(again), weights(straight))


@pytest.mark.parametrize(
    ("change", "kind"),
    [(lambda loss: loss * math.nan, "nan_skipped"), (lambda loss: loss * 1e4, "spike_skipped")],
    ids=["nan", "spike"],
)
def test_a_bad_loss_is_judged_before_the_backward_pass_and_changes_nothing(tiny_recipe, tmp_path, change, kind):
    trainer = released_trainer(tiny_recipe, tmp_path, faults=at_steps(9, change=change))
    kept = []
    end_of_step = trainer.callback_handler.on_step_end

    def keep(*arguments, **options):
        kept.append(weights(trainer))
        return end_of_step(*arguments, **options)

    trainer.callback_handler.on_step_end = keep
    trainer.train()
    assert events(trainer, "nan_skipped", "spike_skipped") == [(kind, 9)]
    assert [number for number, (one, other) in enumerate(pairwise(kept), start=2) if same(one, other)] == [9]
    assert all(math.isfinite(loss) for step, loss in losses(trainer).items() if step != 9)


def test_a_gradient_that_is_not_finite_is_kept_out_and_told(tiny_recipe, tmp_path):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context, loss):
            return loss.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient * math.nan

    trainer = released_trainer(tiny_recipe, tmp_path, faults=at_steps(9, change=Broken.apply))
    trainer.train()
    assert events(trainer, "nan_skipped", "spike_skipped") == [("nan_skipped", 9)]
    assert all(tensor.isfinite().all() for tensor in weights(trainer).values())
