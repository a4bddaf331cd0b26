import time

import torch
from torch.utils.data import Dataset
from transformers import TrainerControl, TrainerState

from cpt.data.loader import CPTDataLoader
from cpt.monitoring.clock import TrainingClock


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


class QuiteSlowRows(Dataset):
    def __getitem__(self, number):
        time.sleep(0.004)
        return {"input_ids": torch.tensor([number])}


class QuickRows(Dataset):
    def __getitem__(self, number):
        return {"input_ids": torch.tensor([number])}


def test_the_wait_of_accumulated_micro_batches_is_a_share_of_their_step():
    waited = run_steps(SlowRows(), micro_batches=20, accumulation=4, step_seconds=0.04)
    assert 0.3 < waited < 0.7, "4 rows take 0.08 s, half of it while the step before goes on"


def test_a_run_that_waits_for_data_is_told_once(caplog):
    run_steps(QuiteSlowRows(), micro_batches=150, accumulation=1, step_seconds=0.001)
    assert caplog.text.count("the model waited for data") == 1
    assert "of the last 100 steps" in caplog.text and "`cpt prepare RECIPE`" in caplog.text


def test_a_run_that_waits_for_its_first_batch_only_is_not_warned(caplog):
    class SlowToStart(QuickRows):
        def __getitem__(self, number):
            time.sleep(0.3 if number == 0 else 0)
            return super().__getitem__(number)

    run_steps(SlowToStart(), micro_batches=101, accumulation=1, step_seconds=0.02)
    assert "waited for data" not in caplog.text
