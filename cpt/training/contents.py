"""Collect what a checkpoint holds: all collective operations of a save happen here, before anything is written."""

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from accelerate.utils import DeepSpeedSchedulerWrapper
from peft import PeftModel
from torch import nn
from transformers import TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.training_args import ParallelMode

from cpt.checkpoints.manifest import STATE, TRAINING_POINT, Manifest, file_of_part
from cpt.checkpoints.resume import ResumePoint
from cpt.checkpoints.sharding import (
    LATEST,
    capture_states,
    full_weights,
    part_here,
    scripts_of_deepspeed,
)
from cpt.checkpoints.snapshot import refuse_non_finite, saved_parameters
from cpt.checkpoints.transaction import Contents, Weights
from cpt.deepspeed_internals import gather_zero3_weights
from cpt.distributed import world_size
from cpt.hf_internals import write_model_files
from cpt.optim.evaluation_point import (
    copy_of_weights,
    evaluation_point,
    has_evaluation_point,
    training_point,
)
from cpt.recipe.keys import DEFAULT_MICRO_BATCH
from cpt.recipe.schema import Recipe
from cpt.runs.folder import RECORD
from cpt.runs.history import copy_of_record, read_history
from cpt.training.engine import Engine

BIT_EXACT = "bit-exact"
WAYS_TO_COMPUTE = (  # free keys that may change the order of sums
    "model.attention",
    "model.fused_loss",
    "training.per_device_train_batch_size",
    "training.gradient_",
    "training.torch_compile",
    "training.use_",
    "training.full_determinism",
    "training.deepspeed",
    "training.fsdp",
)
MOVED = "rounding: the optimizer moved to the host or back, where AdamW rounds differently"


class Stateful(Protocol):
    """A part of a run with a state: torch's protocol, and the name of the state's JSON file in a checkpoint.

    All processes have the same state; the main process writes it.
    """

    file: str

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def contents_of(
    trainer: Any,
    engine: Engine,
    manifest: Manifest,
    *,
    parts: Sequence[Stateful] = (),
    stage_states: Mapping[str, Any] | None = None,
) -> Contents:
    """Return this process's part of the checkpoint that the manifest describes.

    Args:
        trainer: Hugging Face's, whose attributes are annotated less precisely.
        manifest: without its files; of kind `full`, or `weights` for the model alone.
        parts: whose states are in a full checkpoint.
        stage_states: the same for a stage's states, by file name; each process writes its own.
    """
    contents = Contents(manifest, trainer.model, changes_at_any_time=engine.updates_at_any_time)
    engine.reshard()
    with evaluation_point(trainer.optimizer) as is_moved:
        if is_moved:
            weights: Weights | None = copy_of_weights(
                trainer.model, only_trained=trains_adapter(trainer)
            )
        else:
            weights = engine_weights(trainer, engine)
    if trainer.args.should_save:
        add_model(contents, trainer, weights)
    if manifest.kind == "full":
        add_training_states(contents, trainer, engine)
        contents.states[random_states_file(trainer.args)] = random_states(trainer.args)
        contents.states |= stage_states or {}
    if manifest.kind == "full" and trainer.args.should_save:
        contents.texts[STATE] = trainer_state(trainer)
        contents.texts[RECORD] = copy_of_record(Path(str(trainer.args.output_dir)))
        for part in parts:
            contents.texts[part.file] = json.dumps(part.state_dict())
    return contents


def trains_adapter(trainer: Any) -> bool:
    return isinstance(trainer.model, PeftModel)


# --- how exactly a run repeats an uninterrupted one ---


def exactness_of_run(
    point: ResumePoint, recipe: Recipe, arguments: TrainingArguments, folder: Path
) -> str:
    """How exactly this run equals an uninterrupted one, for each checkpoint's manifest."""
    repeats = arguments.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
    so_far = exactness(point, deterministic=repeats)
    if so_far != BIT_EXACT:
        return so_far
    requested = int(recipe.training.get("per_device_train_batch_size", DEFAULT_MICRO_BATCH))
    fits = arguments.per_device_train_batch_size
    if fits < requested:
        return f"rounding: {fits} rows at a time instead of {requested} after out-of-memory: sums in another order"
    changed_keys = []
    for line in read_history(folder):
        for change in line["changes"]:
            changed_keys.append(change["key"])
    rounding = [key for key in changed_keys if key.startswith(WAYS_TO_COMPUTE)]
    if rounding:
        return f"rounding: {', '.join(dict.fromkeys(rounding))} changed during the run"
    return BIT_EXACT


def exactness(point: ResumePoint, *, deterministic: bool) -> str:
    """Return `bit-exact`, or a weaker class and the reason. A run never becomes more exact."""
    before = point.manifest
    if before is not None and before.exactness != BIT_EXACT:
        return before.exactness
    if before is not None and before.world_size != world_size():
        return (
            f"elastic: from step {before.step} with {count_processes(world_size())} instead of {before.world_size}: "
            "the same rows per step, but another order of sums and other random numbers for dropout"
        )
    if point.checkpoint is not None and before is None:
        return f"unproven: resumed from {point.checkpoint}, a checkpoint without a manifest"
    if not deterministic:
        return "rounding: GPU kernels are nondeterministic (slower, but repeatable: `training.full_determinism: true`)"
    return BIT_EXACT


def count_processes(number: int) -> str:
    if number == 1:
        return "1 process"
    return f"{number} processes"


# --- the model -------------------------------------------------------------------------------------------------------


def engine_weights(trainer: Any, engine: Engine) -> Weights | None:
    """The complete weights under ZeRO-3 and FSDP2, gathered; None if the model has them itself."""
    zero = engine.zero_section or {}
    if zero.get("stage") == 3:
        return gather_zero3_weights(trainer.model_wrapped, only_trained=trains_adapter(trainer))
    if trainer.is_fsdp_enabled:
        return full_weights(trainer.model, only_trained=trains_adapter(trainer))
    return None


def add_model(contents: Contents, trainer: Any, weights: Weights | None) -> None:
    """Add the model, its config and the tokenizer, which Hugging Face's Trainer writes."""
    model = trainer.model

    def write_model(folder: Path, weights: Weights | None) -> None:
        # the Trainer empties the mapping that it is given
        write_model_files(trainer, str(folder), None if weights is None else dict(weights))

    contents.weights = weights
    contents.write_model = write_model
    contents.check = partial(refuse_broken_weights, model)
    for parameter, numbers in saved_parameters(model):
        contents.model_bytes += numbers * parameter.element_size()


def refuse_broken_weights(model: nn.Module, weights: Weights | None) -> None:
    """Raise NotFiniteError for a trained weight that is not finite; frozen weights do not change."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if weights is None:
        refuse_non_finite(trained.items())
    else:
        refuse_non_finite((name, weight) for name, weight in weights.items() if name in trained)


# --- optimizer, schedule, progress -----------------------------------------------------------------------------------


def add_training_states(contents: Contents, trainer: Any, engine: Engine) -> None:
    """Add moments, master weights, schedule, and fp16's loss scale."""
    is_main = trainer.args.should_save
    schedule: Any = trainer.lr_scheduler
    has_own_schedule = True
    if trainer.is_deepspeed_enabled:
        add_deepspeed_states(contents, trainer)
        has_own_schedule = not isinstance(schedule, DeepSpeedSchedulerWrapper)
    elif trainer.is_fsdp_enabled:
        file = file_of_part(trainer.args.process_index, trainer.args.world_size)
        contents.states[file] = part_here(trainer.model, engine.optimizer)
    elif is_main:
        contents.states["optimizer.pt"] = trainer.optimizer.state_dict()
        if has_evaluation_point(trainer.optimizer):
            contents.states[TRAINING_POINT] = training_point(trainer.model)
    if is_main and has_own_schedule:
        contents.states["scheduler.pt"] = schedule.state_dict()
    scaler = trainer.accelerator.scaler
    if is_main and scaler is not None:
        contents.states["scaler.pt"] = scaler.state_dict()


def add_deepspeed_states(contents: Contents, trainer: Any) -> None:
    engine = trainer.model_wrapped
    folder = f"{trainer.args.output_dir}/step-{contents.manifest.step}"  # nothing is written to it
    with capture_states(engine, folder) as states:
        engine.save_checkpoint(
            folder, save_latest=False, exclude_frozen_parameters=trains_adapter(trainer)
        )
    contents.states |= states
    if trainer.args.should_save:
        contents.texts[LATEST] = f"global_step{engine.global_steps}"
        contents.texts |= scripts_of_deepspeed()


def trainer_state(trainer: Any) -> str:
    """Return the content of trainer_state.json, with the states of callbacks."""
    states: dict[str, list[Any]] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    stateful_callbacks: Any = trainer.state.stateful_callbacks  # annotated as a list, but a dict
    for name, states_of_class in states.items():
        stateful_callbacks[name] = (
            states_of_class[0] if len(states_of_class) == 1 else states_of_class
        )
    return json.dumps(dataclasses.asdict(trainer.state), indent=2, sort_keys=True) + "\n"


# --- random numbers --------------------------------------------------------------------------------------------------


def random_states(arguments: TrainingArguments) -> dict[str, Any]:
    """Return the states of this process's random generators, in the Trainer's format."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    is_one_of_several = arguments.parallel_mode == ParallelMode.DISTRIBUTED
    for kind, device in devices_with_random_states(arguments).items():
        # Without a wait: a GPU's generator is a seed and an offset on the host, which `CUDAGeneratorImpl::get_state`
        # copies into a tensor on the CPU (aten/src/ATen/cuda/CUDAGeneratorImpl.cpp, torch 2.13).
        states[kind] = device.get_rng_state_all() if is_one_of_several else device.get_rng_state()
    return states


def set_random_states(arguments: TrainingArguments, states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    for kind, device in devices_with_random_states(arguments).items():
        state = states.get(kind, [])
        if isinstance(state, list):  # for all devices of the machine, maybe fewer than now
            state = dict(enumerate(state)).get(device.current_device())
        if state is not None:
            device.set_rng_state(state)


def devices_with_random_states(arguments: TrainingArguments) -> dict[str, Any]:
    """Kind of device -> torch's module."""
    kinds = {arguments.device.type} - {"cpu", "mps"}
    if torch.cuda.is_available():
        kinds.add("cuda")
    return {kind: torch.get_device_module(kind) for kind in kinds}


def random_states_file(arguments: TrainingArguments) -> str:
    if arguments.world_size <= 1:
        return "rng_state.pth"
    return f"rng_state_{arguments.process_index}.pth"
