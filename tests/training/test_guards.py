"""Bad steps and out-of-memory in runs of one process: what is skipped, and what the run restarts from."""

import json
import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from tiny_trainers import (
    at_steps,
    events,
    in_rows,
    losses,
    same,
    train_to_the_end,
    trainer_of,
    weights,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from cpt.checkpoints.resume import published_checkpoints
from cpt.errors import Interrupted, ResourceError, RestartNeeded, TrainingError
from cpt.runs.events import read_events

pytestmark = pytest.mark.heavy

STEPS = 8
SKIPPED = ("nan_skipped", "spike_skipped")


class StatesAt(TrainerCallback):
    """Copies weights and the optimizer's states after each step."""

    def __init__(self):
        self.after = {}

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        states = [value for one in optimizer.optimizer.state.values() for value in one.values()]
        tensors = [*model.state_dict().values(), *filter(torch.is_tensor, states)]
        self.after[state.global_step] = dict(enumerate(tensor.clone() for tensor in tensors))

    def unchanged(self):
        return [
            step
            for before, step in pairwise(self.after)
            if same(self.after[before], self.after[step])
        ]


class Scaled(torch.autograd.Function):
    """A loss whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(context, loss, factor):
        context.factor = factor
        return loss.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * context.factor, None


BAD = {
    "nan": lambda loss: loss * math.nan,
    "spike": lambda loss: loss * 1e4,
    "steep": lambda loss: Scaled.apply(loss, 1e5),
    "nan gradient": lambda loss: Scaled.apply(loss, math.nan),
}


@pytest.mark.parametrize(
    ("optimizer", "dtype", "change", "kind"),
    [
        ("adamw", "bfloat16", "nan", "nan_skipped"),
        ("adamw", "float32", "steep", "spike_skipped"),
        ("sgd", "float32", "spike", "spike_skipped"),
    ],
)
def test_a_bad_step_changes_nothing_and_the_next_one_does(
    tiny_recipe, tmp_path, optimizer, dtype, change, kind
):
    """AdamW's kernel reads a flag; SGD has no such kernel, so the host leaves its step out."""
    tiny_recipe["model"]["dtype"] = dtype
    watcher, settings = StatesAt(), {"name": optimizer, "learning_rate": 3e-3}
    fault = at_steps(6, change=BAD[change])
    trainer = trainer_of(
        tiny_recipe, tmp_path, steps=STEPS, callbacks=[watcher], faults=fault, optimizer=settings
    )
    trainer.train()
    assert events(trainer, *SKIPPED) == [(kind, 6)] and watcher.unchanged() == [6]
    found = losses(trainer)
    assert len(found) == STEPS and all(
        math.isfinite(loss) for step, loss in found.items() if step != 6
    )
    assert change == "steep" or not found[6] < 1e4, "it is logged as it was"


class AsksOfTheDevice(TorchDispatchMode):
    """Counts how often the host asks for the value of a tensor."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += "_local_scalar_dense" in str(function)
        return function(*arguments, **(options or {}))


def test_a_healthy_run_is_the_same_without_the_guard_which_makes_no_step_wait(
    tiny_recipe, tmp_path
):
    tiny_recipe["training"]["logging_steps"] = 100
    guarded = trainer_of(tiny_recipe, tmp_path / "guarded", steps=STEPS)
    free = trainer_of(tiny_recipe, tmp_path / "free", steps=STEPS, safety={"loss_guard": None})
    counts = []
    for trainer in (guarded, free):
        trainer._save_checkpoint = lambda *_: None
        with AsksOfTheDevice() as asks:
            trainer.train()
        counts.append(asks.count)
    assert guarded.guard.detector is not None and free.guard.detector is None
    assert (
        same(weights(guarded), weights(free))
        and counts[0] == counts[1]
        and not events(guarded, *SKIPPED)
    )


def test_the_logged_mean_of_several_steps_is_that_of_the_steps_that_counted(tiny_recipe, tmp_path):
    summed = Counter()

    def fault(trainer, inputs, loss):
        if loss is None:
            return None
        step = trainer.state.global_step + 1
        summed[step] += loss.item()
        return BAD[{2: "nan"}.get(step, "spike")](loss) if step in (2, 5, 6, 7) else loss

    tiny_recipe["training"]["logging_steps"] = 4
    trainer = trainer_of(tiny_recipe, tmp_path, steps=9, faults=fault)
    trainer.train()
    assert losses(trainer)[4] == pytest.approx((summed[1] + summed[3] + summed[4]) / 3)
    assert losses(trainer)[8] == pytest.approx(summed[8])
    skipped = [line.get("skipped_steps") for line in trainer.state.log_history if "loss" in line]
    assert skipped[:2] == [1, 3]


def test_where_all_steps_of_a_log_were_skipped_it_has_the_loss_of_the_last(tiny_recipe, tmp_path):
    summed = Counter()

    def fault(trainer, inputs, loss):
        step = trainer.state.global_step + 1
        if loss is not None and step in (3, 4):
            loss = loss * step * 1e4
            summed[step] += loss.item()
        return loss

    tiny_recipe["training"]["logging_steps"] = 2
    trainer = trainer_of(tiny_recipe, tmp_path, faults=fault)
    trainer.train()
    assert losses(trainer)[4] == pytest.approx(summed[4])
    found = [event for event in read_events(trainer.run_folder) if event["kind"] in SKIPPED]
    assert [event["rows"] for event in found] == [[8, 12], [12, 16]]
    assert [float(event["loss"]) for event in found] == pytest.approx([summed[3], summed[4]])
    assert all(float(event["gradient_norm"]) > 0 for event in found)


def test_another_phase_of_the_data_may_have_another_level_of_the_loss(tiny_recipe, tmp_path):
    def fault(trainer, inputs, loss):
        return loss * 8 if loss is not None and trainer.state.global_step >= 5 else loss

    found, weights = [], {"domain": 0.5, "general": 0.5}
    phases = [{"until": 5 * 256, "weights": weights}, {"weights": weights}]
    for name, changes in (("whole", {}), ("phases", {"phases": phases})):
        data = {**tiny_recipe["data"], **changes}
        trainer = trainer_of(tiny_recipe, tmp_path / name, steps=8, faults=fault, data=data)
        trainer.train()
        found.append([step for _, step in events(trainer, *SKIPPED)])
    assert found == [[6, 7, 8], []]


# --- restarts after too many bad steps ---

BAD_ROWS = (8, 12, 16)  # of steps 3, 4 and 5
TOLERANT = {
    "checkpoints": {"every_steps": 2, "keep": None},
    "safety": {"loss_guard": {"name": "robust", "skips": 2, "rollbacks": 1}},
}


def bad_run(sections, folder, **changes):
    return lambda: trainer_of(
        sections, folder, **{"steps": 6, "faults": in_rows(*BAD_ROWS), **TOLERANT, **changes}
    )


def test_after_too_many_bad_steps_the_run_restarts_before_them_without_their_rows(
    tiny_recipe, tmp_path
):
    back = train_to_the_end(bad_run(tiny_recipe, tmp_path / "back"), restarts=1)
    never = bad_run(tiny_recipe, tmp_path / "never", faults=None)()
    never.rows_of_steps.leave_out([(8, 20)])
    never.train()
    assert events(back, *SKIPPED, "rolled_back") == [
        *(("nan_skipped", step) for step in (3, 4, 5)),
        ("rolled_back", 5),
    ]
    assert losses(back) == losses(never) and same(weights(back), weights(never))
    assert [path.name for path in (back.run_folder / "set-aside").iterdir()] == ["checkpoint-4"]
    saved = back.run_folder / "checkpoint-4"
    after = json.loads((saved / "safety.json").read_text())
    assert after["left_out"] == [[8, 20]] and after["budget"] == {
        "recent": [],
        "total": 3,
        "rollbacks": 1,
    }
    assert json.loads((saved / "data_position.json").read_text())["row"] == 4 * 4 + 12
    skipped, rolled = (
        [event for event in read_events(back.run_folder) if event["kind"] == kind]
        for kind in ("nan_skipped", "rolled_back")
    )
    assert [(event["rows"], event["loss"]) for event in skipped] == [
        ([row, row + 4], "nan") for row in BAD_ROWS
    ]
    about = {"step": 5, "to_step": 2, "left_out": [[8, 12], [12, 16], [16, 20]], "rollbacks": 1}
    assert rolled[0].items() >= about.items()


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 4])
def test_resumed_after_a_roll_back_the_run_is_the_same(tiny_recipe, tmp_path, step):
    make = bad_run(tiny_recipe, tmp_path)
    straight = train_to_the_end(make, restarts=1)
    again = make()
    again.train(resume_from_checkpoint=straight.run_folder / f"checkpoint-{step}")
    assert same(weights(again), weights(straight)) and again.rows_of_steps.left_out == [(8, 20)]


def test_without_a_checkpoint_from_before_the_run_continues(tiny_recipe, tmp_path):
    trainer = train_to_the_end(bad_run(tiny_recipe, tmp_path, checkpoints={}), restarts=0)
    (back,) = [event for event in read_events(trainer.run_folder) if event["kind"] == "rolled_back"]
    assert (
        back["to_step"] is None and len(losses(trainer)) == 6 and not trainer.rows_of_steps.left_out
    )


def test_a_run_that_was_asked_to_stop_rolls_back_and_does_not_restart(tiny_recipe, tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 5

    trainer = bad_run(tiny_recipe, tmp_path, callbacks=[Stop()])()
    with pytest.raises(Interrupted) as stopped:
        trainer.train()
    assert not isinstance(stopped.value, RestartNeeded)
    assert published_checkpoints(trainer.run_folder)[-1].name == "checkpoint-2"


# --- a recovery handler ---

SEEN = []


def decide(spike, *, at: int = 5, action: str | None = None):
    """Skip every spike, and return `action` from that step on."""
    SEEN.append(spike)
    return action if spike.step >= at else "skip"


def handled(sections, folder, rows=BAD_ROWS, **options):
    safety = {**TOLERANT["safety"], "on_spike": {"name": f"{__name__}:decide", **options}}
    return bad_run(sections, folder, safety=safety, faults=in_rows(*rows))


@pytest.mark.slow
def test_a_handler_gets_each_spike_and_decides_what_follows(tiny_recipe, tmp_path):
    SEEN.clear()
    skips = train_to_the_end(handled(tiny_recipe, tmp_path / "skip", action="skip"), restarts=0)
    assert events(skips, *SKIPPED, "rolled_back") == [("nan_skipped", step) for step in (3, 4, 5)]
    assert [(spike.step, spike.recent, spike.rollbacks) for spike in SEEN] == [
        (3, 1, 0),
        (4, 2, 0),
        (5, 3, 0),
    ]
    assert all(math.isnan(spike.loss) and spike.run_folder == skips.run_folder for spike in SEEN)
    by_rule = train_to_the_end(handled(tiny_recipe, tmp_path / "rule"), restarts=1)
    assert events(by_rule, "rolled_back") == [("rolled_back", 5)]
    back = handled(tiny_recipe, tmp_path / "back", rows=BAD_ROWS[:1], at=3, action="roll_back")
    back = train_to_the_end(back, restarts=1)
    assert events(back, "rolled_back") == [("rolled_back", 3)] and back.rows_of_steps.left_out == [
        (8, 12)
    ]


@pytest.mark.parametrize("options", [{"name": "abort"}, {"action": "abort"}, {"action": "ignore"}])
def test_a_handler_can_end_the_run_and_a_wrong_answer_does(tiny_recipe, tmp_path, options):
    with pytest.raises(TrainingError) as ended:
        handled(tiny_recipe, tmp_path, **options)().train()
    named = "`safety.on_spike: abort`" if "name" in options else ":decide`"
    assert named in str(ended.value) and ("'ignore'" in str(ended.value)) == (
        "ignore" in options.values()
    )


# --- out of memory ---


def too_large_above(limits):
    """Out of memory with more rows than limits[step], from that step on."""

    def fault(trainer, inputs, loss):
        limit = min(
            (rows for step, rows in limits.items() if trainer.state.global_step + 1 >= step),
            default=99,
        )
        if len(inputs["input_ids"]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return loss

    return fault


def in_micro_batches(sections, size):
    return {**sections, "training": {**sections["training"], "per_device_train_batch_size": size}}


@pytest.mark.parametrize(
    ("size", "safety", "remedy"),
    [
        (1, {}, "gradient_checkpointing"),
        (4, {"on_oom": "abort"}, "safety.on_oom: split_batch"),
        (4, {"on_oom": {"name": f"{__name__}:ends_at", "step": 2}}, "safety.on_oom: split_batch"),
    ],
)
def test_where_a_step_cannot_be_split_the_run_ends_with_what_helps(
    tiny_recipe, tmp_path, size, safety, remedy
):
    trainer = trainer_of(
        in_micro_batches(tiny_recipe, size),
        tmp_path,
        faults=too_large_above({2: size - 1}),
        safety=safety,
    )
    with pytest.raises(ResourceError, match=f"step 2 .*{remedy}"):
        trainer.train()
    assert not (trainer.run_folder / "learned.json").exists()


def ends_at(event, *, step):
    assert (event.micro_batch, event.peak_memory_gib) == (4, None) and event.run_folder.is_dir()
    return "abort" if event.step == step else None


def unsure(event):
    return "maybe"


@pytest.mark.parametrize(
    ("handler", "error", "named"),
    [
        ({"name": f"{__name__}:ends_at", "step": 9}, RestartNeeded, "micro-batches of 2"),
        ({"name": f"{__name__}:unsure"}, TrainingError, "split_batch, abort"),
    ],
)
def test_a_handler_of_out_of_memory_may_decide_nothing_and_must_know_its_words(
    tiny_recipe, tmp_path, handler, error, named
):
    trainer = trainer_of(
        in_micro_batches(tiny_recipe, 4),
        tmp_path,
        faults=too_large_above({2: 3}),
        safety={"on_oom": handler},
    )
    with pytest.raises(error, match=named):
        trainer.train()


# --- updates in the backward pass ---


EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit")


def released_trainer(sections, folder, *, name="adamw", releases=True, **changes):
    training = {**sections["training"], "max_grad_norm": 0, "per_device_train_batch_size": 4}
    optimizer = {
        "name": name,
        "learning_rate": 3e-3,
        "rounding": "stochastic",
        "release_gradients": releases,
    }
    model = {**sections["model"], "dtype": "bfloat16"}
    return trainer_of(
        sections,
        folder,
        steps=STEPS,
        optimizer=optimizer,
        training=training,
        model=model,
        **changes,
    )


@pytest.mark.parametrize(
    "name",
    ["adamw", *(pytest.param(name, marks=pytest.mark.quantized) for name in EIGHT_BIT)],
)
@pytest.mark.parametrize(
    ("change", "kind"), [("spike", "spike_skipped"), ("nan gradient", "nan_skipped")]
)
def test_with_released_gradients_a_bad_step_is_not_applied(
    tiny_recipe, tmp_path, name, change, kind
):
    """A bad loss is found before the backward pass, which updates; a bad gradient in it."""
    watcher, fault = StatesAt(), at_steps(6, change=BAD[change])
    trainer = released_trainer(tiny_recipe, tmp_path, name=name, callbacks=[watcher], faults=fault)
    trainer.train()
    assert events(trainer, *SKIPPED) == [(kind, 6)] and (
        change == "nan gradient" or watcher.unchanged() == [6]
    )
    _, norms = trainer.guard.detector.state()["history"]
    assert sum(norm is not None and norm > 0 for norm in norms) == STEPS - 1
    before = {name: weight.clone() for name, weight in weights(trainer).items()}
    ids = torch.arange(5)[None]
    trainer.accelerator.backward(trainer.model(input_ids=ids, labels=ids).loss)
    assert same(weights(trainer), before), "after the training a backward pass updates nothing"
    assert all(weight.grad is not None for weight in trainer.model.parameters())
    assert all(tensor.isfinite().all() for tensor in weights(trainer).values())
