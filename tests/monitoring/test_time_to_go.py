from types import SimpleNamespace

from transformers import TrainerControl, TrainerState

from cpt.monitoring import time_to_go as module
from cpt.monitoring.time_to_go import TimeToGo


def test_what_is_left_takes_as_long_as_what_was_made_without_the_first_step(monkeypatch):
    now, callback, state = [0.0], TimeToGo(), TrainerState(max_steps=10)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    callback.on_train_begin(None, state, TrainerControl())
    told = []
    for step, seconds in ((3, 100.0), (4, 2.0), (5, 4.0), (4, 3.0)):  # resumed at 2; the last is after going back
        now[0] += seconds
        state.global_step = step
        callback.on_step_end(None, state, TrainerControl())
        callback.on_log(None, state, TrainerControl(), logs=(logs := {"loss": 1.0}))
        told.append(logs.get("seconds_to_go"))
    assert told == [None, 12.0, 15.0, 18.0]
