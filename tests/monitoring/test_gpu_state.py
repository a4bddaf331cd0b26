from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from cpt.monitoring.gpu_state import GpuState

pynvml = pytest.importorskip("pynvml")
ON_GPU = SimpleNamespace(device=torch.device("cuda"))


def log(callback, arguments=ON_GPU):
    callback.on_log(
        arguments, TrainerState(is_world_process_zero=True), TrainerControl(), logs=(logs := {"loss": 1.0})
    )
    return logs


def test_the_gpu_is_asked_through_torch(monkeypatch):
    for name, value in {"temperature": 61, "power_draw": 423_500, "utilization": 97}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    figures = {"gpu_temperature_celsius": 61, "gpu_power_watts": 423.5, "gpu_utilization_percent": 97}
    assert log(GpuState()) == {"loss": 1.0, **figures}
    assert log(GpuState(), SimpleNamespace(device=torch.device("cpu"))) == {"loss": 1.0}


def test_a_gpu_that_cannot_tell_is_asked_once(monkeypatch):
    asked = []

    def refuse():
        asked.append(1)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(torch.cuda, "temperature", refuse)
    callback = GpuState()
    callback.pace.look = lambda look: look()
    assert log(callback) == log(callback) == {"loss": 1.0} and asked == [1]


def test_without_the_package_nothing_is_asked(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert log(GpuState()) == {"loss": 1.0}
