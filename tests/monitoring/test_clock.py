import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset
from transformers import TrainerControl, TrainerState

from cpt.data.loader import CPTDataLoader
from cpt.monitoring import clock as clock_module
from cpt.monitoring.clock import TrainingClock, middle_and_slow


def test_the_speed_leaves_out_evaluation_and_saving():
    clock, state = TrainingClock(tokens_per_step=1000), TrainerState(max_steps=4)
    clock.on_train_begin(None, state, TrainerControl())
    for step in (1, 2):
        state.global_step = step
        time.sleep(0.05)
        clock.on_step_end(None, state, TrainerControl())
        time.sleep(0.3)  # an evaluation
        clock.on_evaluate(None, state, TrainerControl())
    logs = {"loss": 1.0}
    clock.on_log(None, state, TrainerControl(), logs=logs, train_dataloader=None)
    assert 2000 / 0.6 < logs["tokens_per_second"] <= 2000 / 0.1  # with the evaluations it would be at most 2000 / 0.7


def test_the_epoch_is_the_share_of_the_whole_run():
    clock, state = TrainingClock(tokens_per_step=1), TrainerState(max_steps=8, global_step=6)
    clock.on_step_end(None, state, TrainerControl())
    assert state.epoch == 0.75


class SlowRows(Dataset):
    def __getitem__(self, number):
        time.sleep(0.02)
        return {"input_ids": torch.tensor([number])}


def test_the_wait_for_data_is_a_share_of_the_time():
    loader = CPTDataLoader(SlowRows(), micro_batch=1, rows_in_all=10)
    clock, state = TrainingClock(tokens_per_step=1), TrainerState(max_steps=10)
    clock.on_train_begin(None, state, TrainerControl())
    for _ in loader:
        clock.on_step_end(None, state, TrainerControl())
    logs = {"loss": 1.0}
    clock.on_log(None, state, TrainerControl(), logs=logs, train_dataloader=loader)
    assert 0.8 < logs["data_wait"] <= 1.0


def run_steps(rows, micro_batches, accumulation, step_seconds):
    """A clock after steps that each take micro-batches and then time, as the Trainer does."""
    loader = CPTDataLoader(rows, micro_batch=1, rows_in_all=micro_batches)
    clock, state, batches = TrainingClock(tokens_per_step=1), TrainerState(max_steps=micro_batches), iter(loader)
    clock.on_train_begin(None, state, TrainerControl())
    for _ in range(micro_batches // accumulation):
        for _ in range(accumulation):
            next(batches)
        time.sleep(step_seconds)
        clock.on_step_end(None, state, TrainerControl(), train_dataloader=loader)
    batches.close()
    logs = {"loss": 1.0}
    clock.on_log(None, state, TrainerControl(), logs=logs, train_dataloader=loader)
    return logs["data_wait"]


def test_the_wait_of_accumulated_micro_batches_is_a_share_of_their_step():
    waited = run_steps(SlowRows(), micro_batches=20, accumulation=4, step_seconds=0.04)
    assert 0.3 < waited < 0.7, "4 rows take 0.08 s, half of it while the step before goes on"


@pytest.fixture
def warnings_of(monkeypatch, caplog):
    """How often a run is warned whose steps take a second, and wait so long of it."""

    def run(waits):
        now, loader = [0.0], CPTDataLoader(SlowRows(), micro_batch=1, rows_in_all=1)
        monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        clock, state = TrainingClock(tokens_per_step=1), TrainerState(max_steps=len(waits))
        clock.on_train_begin(None, state, TrainerControl())
        for waited in waits:
            now[0] += 1
            loader.waited_seconds += waited
            clock.on_step_end(None, state, TrainerControl(), train_dataloader=loader)
        return caplog.text.count("the model waited for data")

    return run


def test_a_run_that_waits_for_data_is_told_once_and_what_to_do(warnings_of, caplog):
    assert warnings_of([0.02] * 300) == 1
    assert "2.0% of the last 100 steps" in caplog.text and "`cpt prepare RECIPE`" in caplog.text


@pytest.mark.parametrize(
    "waits", [[0.009] * 300, [0.5] * 99, [0.9, *[0.005] * 200]], ids=["bearable", "too few steps", "the first only"]
)
def test_a_run_that_waits_a_little_is_not_warned(warnings_of, waits):
    assert warnings_of(waits) == 0


def test_a_run_that_begins_to_wait_later_is_warned(warnings_of):
    assert warnings_of([0.0] * 500 + [0.05] * 30) == 1


def test_the_middle_and_the_slow_steps_are_interpolated():
    assert middle_and_slow([float(number) for number in range(101)]) == (50.0, 95.0)
    assert middle_and_slow([1.0, 3.0]) == (2.0, 2.9) and middle_and_slow([4.0]) == (4.0, 4.0)


def test_steps_that_are_slow_now_and_then_show(monkeypatch):
    now, state = [0.0], TrainerState(max_steps=200)
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock, loader = TrainingClock(tokens_per_step=10), CPTDataLoader(SlowRows(), micro_batch=1, rows_in_all=1)
    clock.on_train_begin(None, state, TrainerControl())
    for step in range(1, 201):
        now[0] += 3.0 if step % 10 == 0 else 1.0
        state.global_step = step
        clock.on_step_end(None, state, TrainerControl(), train_dataloader=loader)
    clock.on_log(None, state, TrainerControl(), logs=(logs := {"loss": 1.0}), train_dataloader=loader)
    assert logs["step_seconds_p50"] == 1.0 and logs["step_seconds_p95"] == 3.0 and logs["tokens"] == 2000
