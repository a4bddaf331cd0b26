"""What the Trainer keeps besides weights, in the form in which it reads them again: random numbers, its own progress,
its scaler."""

import dataclasses
import json
import random
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.training_args import ParallelMode

PACKAGES = ("cpt", "torch", "transformers", "accelerate", "deepspeed", "peft", "safetensors")


def random_states(trainer: Trainer) -> dict[str, Any]:
    """The random numbers of this process, as `Trainer._load_rng_state` takes them."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    kinds = {trainer.args.device.type} - {"cpu", "mps"} | ({"cuda"} if torch.cuda.is_available() else set())
    for kind in kinds:
        device: Any = torch.get_device_module(kind)
        is_one_of_several = trainer.args.parallel_mode == ParallelMode.DISTRIBUTED
        states[kind] = device.random.get_rng_state_all() if is_one_of_several else device.random.get_rng_state()
    return states


def random_states_file(trainer: Trainer) -> str:
    """Its name: each process has its own."""
    return "rng_state.pth" if trainer.args.world_size <= 1 else f"rng_state_{trainer.args.process_index}.pth"


def progress(trainer: Trainer) -> str:
    """The content of trainer_state.json, with what callbacks want to keep."""
    known: dict[str, Any] = trainer.state.stateful_callbacks  # type: ignore[assignment]  # what it is annotated as is what it is made from
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            name = type(callback).__name__
            kept = known[name]
            if isinstance(kept, list):  # several of one kind
                kept.append(callback.state())
            else:
                known[name] = callback.state()
    return json.dumps(dataclasses.asdict(trainer.state), indent=2, sort_keys=True) + "\n"


def versions() -> dict[str, str]:
    """Of the packages that a checkpoint depends on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
