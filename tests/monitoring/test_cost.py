import json
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from cpt.monitoring import cost as module
from cpt.monitoring.cost import Cost

TWO_GPUS = SimpleNamespace(world_size=2, n_gpu=1)


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def logged(callback, **figures):
    callback.on_log(TWO_GPUS, TrainerState(), TrainerControl(), logs=(logs := {"loss": 1.0, **figures}))
    return logs


def test_time_is_paid_for_each_gpu(tmp_path, clock):
    callback = Cost(tmp_path, dollars_per_gpu_hour=2.5)
    callback.on_train_begin(TWO_GPUS, TrainerState(is_world_process_zero=True), TrainerControl())
    clock[0] += 1800
    assert logged(callback, seconds_to_go=7200) == {
        "loss": 1.0,
        "seconds_to_go": 7200,
        "cost": 2.5,
        "cost_to_go": 10.0,
    }


@pytest.mark.parametrize(("step", "before"), [(40, 7.0), (0, 0.0)], ids=["goes on", "begins anew"])
def test_what_earlier_starts_came_to_is_counted_also_where_their_steps_were_lost(step, before, tmp_path, clock):
    lines = [
        {"step": 50, "tokens": 5, "cost": 6.5},
        {"step": 60, "tokens": 6, "cost": 7.0},
        {"step": 60, "tokens": 6, "eval_loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{half a li")
    callback = Cost(tmp_path, dollars_per_gpu_hour=1)
    callback.on_train_begin(TWO_GPUS, TrainerState(global_step=step, is_world_process_zero=True), TrainerControl())
    clock[0] += 1800
    assert logged(callback)["cost"] == before + 1.0
