"""The device of tests/gpu. `CPT_GPU_TESTS_ON=cpu` rehearses those that use it, without what only a GPU can show."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cpt.planning.fake_model import PeakOfStorages

DEVICE = os.environ.get("CPT_GPU_TESTS_ON", "cuda")
ON_GPU = DEVICE == "cuda"
BACKEND = "inductor" if ON_GPU else "aot_eager"


def let_deepspeed_use(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that a test starts inherit `DS_ACCELERATOR=cpu`, with which DeepSpeed would train on the CPU."""
    if device == "cuda":
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)


def raise_on_waits(wanted: bool) -> None:
    """An operation that makes the host wait for the GPU raises an error from here on."""
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("error" if wanted else "default")


@contextmanager
def no_waits() -> Iterator[None]:
    """As `raise_on_waits`, inside."""
    raise_on_waits(True)
    try:
        yield
    finally:
        raise_on_waits(False)


def peak_of(function: Callable[[], Any]) -> int:
    """Bytes that are allocated at most while the function runs, beyond those before; on a CPU as storages count
    them."""
    if not ON_GPU:
        with PeakOfStorages() as storages:
            function()
        return storages.peak
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated() - before
