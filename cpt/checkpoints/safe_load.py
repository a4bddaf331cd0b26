"""Read a checkpoint's pickles as data: a pickle that would call a function is refused.

DeepSpeed asks for torch's unrestricted unpickler in a dozen places; a switch of torch overrules it for resuming, for
universal checkpoints and for consolidating ZeRO's parts.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from cpt.errors import CheckpointError

FORCE_DATA, FORCE_CODE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
HARMLESS = {  # what DeepSpeed puts beside its tensors; making one of these does nothing
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}

BEFORE_CUDA = 9  # torch asks in the order of these numbers; its own begin with 10
CALLED = re.compile(r"GLOBAL (\w+(?:\.\w+)+)")  # in torch's message; of a damaged file it may name nonsense
trusted: ContextVar[bool] = ContextVar("trusted", default=False)


@contextmanager
def only_data(what: Path, *, trust: bool = False) -> Iterator[None]:
    """Within it `torch.load` reads data only, even if the caller asks for more; a CheckpointError names `what`. With
    `trust`, pickles may call functions, even if a caller asks for data only."""
    if trust or trusted.get():
        before_it = trusted.set(True)
        try:
            yield
        finally:
            trusted.reset(before_it)
        return
    before = {name: os.environ.pop(name, None) for name in (FORCE_DATA, FORCE_CODE)}
    os.environ[FORCE_DATA] = "1"
    try:
        with torch.serialization.safe_globals(harmless_classes()):
            yield
    except UnpicklingError as problem:
        called = CALLED.search(str(problem))
        if called is None:
            # Before this word, torch advises to allow code.
            reason = " ".join(str(problem).split()).rpartition("WeightsUnpickler error: ")[2]
            raise CheckpointError(f"{what}: a file is damaged: {reason[:300]}") from problem
        raise CheckpointError(
            f"{what}: a file holds more than tensors and numbers, reading it would call {called[1]}. It was not read. "
            "If you know who wrote it: cpt train --resume PATH --trust-checkpoint."
        ) from problem
    finally:
        del os.environ[FORCE_DATA]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def harmless_classes() -> list[Any]:
    """numpy's arrays, as in random states, and DeepSpeed's classes if this process uses DeepSpeed."""
    rebuild = np.empty(0).__reduce__()[0]  # the function that an array's pickle calls
    arrays: list[Any] = [rebuild, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    if "deepspeed" not in sys.modules:
        return arrays
    return arrays + [vars(import_module(module))[name] for module, names in HARMLESS.items() for name in names]


def load_data(path: Path, *, map_location: Any = "cpu", mmap: bool = False, trust: bool = False) -> Any:
    """`torch.load` of one file of a checkpoint, as data; a CheckpointError if it holds more."""
    with only_data(path, trust=trust):
        return torch.load(path, map_location=map_location, mmap=mmap, weights_only=not trusted.get())


@cache
def know_indexed_cpu() -> None:
    """Let torch restore to `cpu:0`, which transformers 5.17 asks for in runs of several CPU processes; 5.18 asks for
    `cpu`."""

    def restore(storage: Any, location: str) -> Any:
        return storage if location.startswith("cpu:") else None

    torch.serialization.register_package(BEFORE_CUDA, lambda storage: None, restore)
