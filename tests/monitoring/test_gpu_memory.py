from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from cpt.hardware import GIB
from cpt.monitoring.gpu_memory import GpuMemory
from cpt.runs.signs import Sign, write_sign

STATS = {
    "allocated_bytes.all.current": 2 * GIB,
    "reserved_bytes.all.current": 5 * GIB,
    "allocated_bytes.all.peak": 4 * GIB,
}


def logged(folder, processes=1, device="cuda", **state):
    arguments = SimpleNamespace(device=torch.device(device), world_size=processes)
    GpuMemory(folder).on_log(
        arguments,
        TrainerState(**{"is_world_process_zero": True, **state}),
        TrainerControl(),
        logs=(logs := {"loss": 1}),
    )
    return logs


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: STATS)


def test_memory_is_what_torch_says_of_it(tmp_path):
    figures = {"gpu_memory_allocated_gib": 2.0, "gpu_memory_reserved_gib": 5.0, "gpu_memory_peak_gib": 4.0}
    assert logged(tmp_path) == {"loss": 1, **figures}
    assert logged(tmp_path, device="cpu") == logged(tmp_path, is_world_process_zero=False) == {"loss": 1}


def test_the_peak_is_that_of_the_process_that_needs_most(tmp_path):
    for rank, peak in enumerate((4.0, 7.5, None, 9.0)):
        write_sign(tmp_path, Sign(rank, 1, "h", "training", 1, 1, None, peak))
    assert logged(tmp_path, processes=3)["gpu_memory_peak_gib"] == 7.5, "the fourth is of an earlier start"
    assert logged(tmp_path, processes=4)["gpu_memory_peak_gib"] == 9.0
