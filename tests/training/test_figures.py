import json
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from cpt.training import metrics as module
from cpt.training.metrics import Cost, SmoothedLoss, TrainingClock

TWO_GPUS = SimpleNamespace(world_size=2, n_gpu=1)


@pytest.fixture
def now(monkeypatch):
    """The clock: a list with its time."""
    time_now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: time_now[0]))
    return time_now


def test_the_speed_excludes_evaluation_and_saving(now):
    clock, state = TrainingClock(tokens_per_step=1000), TrainerState(max_steps=4)
    clock.on_train_begin(None, state, TrainerControl())
    for event in (clock.on_evaluate, clock.on_save):
        state.global_step += 1
        now[0] += 2
        clock.on_step_end(None, state, TrainerControl())
        now[0] += 100
        event(None, state, TrainerControl())
    logs = {"loss": 1.0}
    clock.on_log(None, state, TrainerControl(), logs=logs, train_dataloader=None)
    assert logs["tokens_per_second"] == 500 and logs["tokens"] == 2000 and state.epoch == 0.5


def test_the_time_left_is_that_of_the_steps_so_far_without_the_first(now):
    clock, state = TrainingClock(tokens_per_step=1), TrainerState(max_steps=10)
    clock.on_train_begin(None, state, TrainerControl())
    found = []
    for step, seconds in ((3, 100.0), (4, 2.0), (5, 4.0), (4, 3.0)):  # resumed at 2; the last is after a roll-back
        now[0] += seconds
        state.global_step = step
        clock.on_step_end(None, state, TrainerControl())
        clock.on_log(None, state, TrainerControl(), logs=(logs := {"loss": 1.0}), train_dataloader=None)
        found.append(logs.get("seconds_to_go"))
    assert found == [None, 12.0, 15.0, 18.0]


def smoothed(losses, history=()):
    callback, found = SmoothedLoss(), []
    callback.on_train_begin(None, TrainerState(log_history=[{"loss": loss} for loss in history]), TrainerControl())
    for loss in losses:
        callback.on_log(None, TrainerState(), TrainerControl(), logs=(logs := {"loss": loss}))
        found.append(logs.get("loss_smoothed"))
    return found


def test_each_log_weighs_nine_tenths_of_the_next():
    assert smoothed([4.0, 2.0, 1.0]) == pytest.approx([4.0, (0.9 * 4 + 2) / 1.9, (0.81 * 4 + 0.9 * 2 + 1) / 2.71])


def test_a_run_that_goes_on_smooths_as_if_it_had_never_stopped():
    assert smoothed([5.0, 6.0], history=[4.0, 2.0, 1.0]) == smoothed([4.0, 2.0, 1.0, 5.0, 6.0])[3:]


def logged(callback, **figures):
    callback.on_log(TWO_GPUS, TrainerState(), TrainerControl(), logs=(logs := {"loss": 1.0, **figures}))
    return logs


def test_time_is_paid_for_each_gpu(tmp_path, now):
    callback = Cost(tmp_path, dollars_per_gpu_hour=2.5)
    callback.on_train_begin(TWO_GPUS, TrainerState(is_world_process_zero=True), TrainerControl())
    now[0] += 1800
    assert logged(callback, seconds_to_go=7200) == {
        "loss": 1.0,
        "seconds_to_go": 7200,
        "cost": 2.5,
        "cost_to_go": 10.0,
    }


@pytest.mark.parametrize(("step", "before"), [(40, 7.0), (0, 0.0)], ids=["goes on", "begins anew"])
def test_what_earlier_starts_came_to_is_counted_also_where_their_steps_were_lost(step, before, tmp_path, now):
    lines = [
        {"step": 50, "tokens": 5, "cost": 6.5},
        {"step": 60, "tokens": 6, "cost": 7.0},
        {"step": 60, "tokens": 6, "eval_loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{half a li")
    callback = Cost(tmp_path, dollars_per_gpu_hour=1)
    callback.on_train_begin(TWO_GPUS, TrainerState(global_step=step, is_world_process_zero=True), TrainerControl())
    now[0] += 1800
    assert logged(callback)["cost"] == before + 1.0
