from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from cpt.hardware import GIB
from cpt.runs.events import LastHeartbeat, write_heartbeat
from cpt.training.metrics import MachineUse

CPU, GPU = (SimpleNamespace(device=torch.device(name), world_size=3) for name in ("cpu", "cuda"))


def logged(callback, arguments=CPU, *, is_main=True, **logs):
    logs = logs or {"loss": 1.0}
    callback.on_log(arguments, TrainerState(is_world_process_zero=is_main), TrainerControl(), logs=logs)
    return logs


@pytest.fixture
def callback(tmp_path):
    callback = MachineUse(tmp_path)
    callback.on_train_begin(None, TrainerState(), TrainerControl())
    return callback


@pytest.fixture
def gpu(monkeypatch):
    memory = {"allocated_bytes.all.current": 2, "reserved_bytes.all.current": 5, "allocated_bytes.all.peak": 4}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {name: size * GIB for name, size in memory.items()})
    for name, value in {"temperature": 61, "power_draw": 423_500, "utilization": 97}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)


def test_the_main_process_adds_figures_to_logs_of_the_training_loss(callback):
    assert logged(callback, is_main=False) == {"loss": 1.0} and logged(callback, eval_loss=1.0) == {"eval_loss": 1.0}
    figures = logged(callback)
    assert 0 <= figures["cpu_percent"] <= 100 and figures["host_memory_gib"] > 0.01


def test_a_gpu_has_memory_at_each_log_and_its_peak_is_the_largest_of_all_processes(callback, tmp_path, gpu):
    for rank, peak in enumerate((4.0, 7.5, None, 9.0)):  # the fourth is of an earlier start
        write_heartbeat(tmp_path, LastHeartbeat(rank, 1, "h", "training", 1, 1, None, peak))
    first, second = logged(callback, GPU), logged(callback, GPU)
    memory = {"gpu_memory_allocated_gib": 2.0, "gpu_memory_reserved_gib": 5.0, "gpu_memory_peak_gib": 7.5}
    assert first.items() > memory.items() and second == {"loss": 1.0, **memory}


def test_nvml_is_asked_through_torch_and_after_a_refusal_no_more(callback, gpu, monkeypatch):
    pynvml = pytest.importorskip("pynvml")
    figures = {"gpu_temperature_celsius": 61, "gpu_power_watts": 423.5, "gpu_utilization_percent": 97}
    assert callback.gpu_state() == figures
    asked = []

    def refuse():
        asked.append(1)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(torch.cuda, "temperature", refuse)
    assert callback.gpu_state() == callback.gpu_state() == {} and asked == [1]
