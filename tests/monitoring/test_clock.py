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
