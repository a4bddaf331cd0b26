"""Prove before the first step that the fast parts of a run compute what torch's plain operations do, on this machine.

A part that differs is replaced at the next start if its key is `auto`; otherwise the run ends with the reason.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils.memory import clear_device_cache
from torch import nn

from cpt.data.rows.packing import IGNORED
from cpt.distributed import main_process_decides, print_once, world_size
from cpt.errors import RecipeError, RestartNeeded
from cpt.hardware import find_gpus
from cpt.hf_internals import attention_of
from cpt.models.attention import add_document_bounds, wants_bounds
from cpt.models.fast_parts import (
    ATTENTION,
    COMPILING,
    HALF,
    LOSS,
    SINGLE,
    Gradients,
    PartDifference,
    Tolerance,
    compare_fast_parts,
    fast_parts,
)
from cpt.models.layers import wanted_compiling
from cpt.optim.adamw import OneKernelAdamW, flat
from cpt.recipe.keys import AUTO
from cpt.recipe.schema import Recipe
from cpt.runs.events import record_event
from cpt.runs.folder import RECIPE, read_object, read_recipe
from cpt.runs.record import hash_of_code, installed_version
from cpt.training.restart import LEARNED, remember

if TYPE_CHECKING:
    from cpt.training.trainer import CPTTrainer

MOST_TOKENS = 512
WEIGHTS_DTYPE = "model.dtype"  # fp32 weights are updated by torch's own kernel
OPTIMIZER = "optimizer.name"
PLAIN_VALUES = {LOSS: False, COMPILING: False, ATTENTION: "sdpa", WEIGHTS_DTYPE: "float32", OPTIMIZER: "adamw"}
FALLBACKS, PROVEN = "fallbacks", "first_batch"  # in learned.json
LIBRARIES = ("torch", "triton", "transformers", "accelerate", "flash-attn")
MOST_UPDATED, UPDATES = 8192, 3  # weights of the copy that the optimizer's kernel updates
UPDATE_TOLERANCE = Tolerance(loss=0.0, gradient=0.02)


def prove_first_batch(trainer: "CPTTrainer") -> None:
    """Compare the fast parts with plain operations, once model and optimizer are prepared.

    Raises:
        RestartNeeded: a part differs whose key is `auto`: the next start uses another value.
        RecipeError: a part differs that the recipe requires.
    """
    requested = trainer.recipe.safety.first_batch_proof
    if requested is False or (requested == "auto" and trainer.args.device.type != "cuda"):
        return
    proof = {**describe_machine(), "parts": describe_parts(trainer)}
    learned = main_process_decides(lambda: read_object(trainer.run_folder / LEARNED))
    if learned.get(PROVEN) == proof:
        return  # resumed on an equal machine
    differing = compare_first_row(trainer) + compare_optimizer(trainer)
    clear_device_cache(garbage_collection=True)
    if differing:
        main_process_decides(lambda: fall_back(trainer, differing))
    main_process_decides(lambda: remember(trainer.run_folder, PROVEN, proof))
    print_once("First batch: the fast parts agree with torch's plain operations.")


def compare_first_row(trainer: "CPTTrainer") -> list[PartDifference]:
    """Compare the model's fast parts on this process's first row; the worst difference of all processes counts."""
    model, arguments = trainer.model, trainer.args
    rows_each = arguments.per_device_train_batch_size
    number = trainer.first_step * trainer.length.rows_per_step + arguments.process_index * rows_each
    # At most half a micro-batch: whole logits and attention scores then need no more memory than a step.
    longest = min(MOST_TOKENS, max(2, rows_each * trainer.recipe.data.sequence_length // 2))
    row = start_of_row(trainer.rows[number], longest, packed=wants_bounds(model))
    whole = trainer.accelerator.unwrap_model(model)
    if row is None or trainer.shared_rows.parts > 1 or whole.get_output_embeddings() is None:
        print_once("First batch: not compared, because this stage has no rows of tokens for a language model.")
        return []
    row = {
        name: value.to(arguments.device) if isinstance(value, torch.Tensor) else value for name, value in row.items()
    }
    is_half = any(weight.dtype in (torch.float16, torch.bfloat16) for weight in model.parameters())
    is_rounded = arguments.bf16 or arguments.fp16 or torch.get_float32_matmul_precision() != "highest"
    tolerance = HALF if is_half or is_rounded else SINGLE
    gradients: Gradients = "returned"
    if trainer.is_fsdp_enabled:
        gradients = "accumulated"
    elif trainer.engine.sharding == "zero3":
        gradients = "none"
    return compare_fast_parts(model, row, tolerance, gradients=gradients, everywhere=largest_of_processes)


def start_of_row(example: Any, longest: int, *, packed: bool) -> dict[str, Any] | None:
    """Return the first tokens of a row as a batch of one row; None if the example has none, such as a prompt's text.

    Args:
        packed: kernels keep documents apart. A row whose start is within one document becomes two documents, so that
            the kernel for several is compared.
    """
    if not isinstance(example, Mapping):
        return None
    columns = dict(example)
    if "input_ids" not in columns:
        ids = [*columns.get("prompt_ids", ()), *columns.get("chosen_ids", columns.get("completion_ids", ()))]
        columns = {"input_ids": torch.tensor(ids, dtype=torch.long)}
    if len(columns["input_ids"]) == 0:
        return None
    row: dict[str, Any] = {}
    for name in ("input_ids", "labels", "position_ids", "attention_mask"):
        if name in columns:
            values = columns[name] if columns[name].dim() == 1 else columns[name][0]
            row[name] = values[None, :longest].clone()
    ids = row["input_ids"]
    length = ids.shape[1]
    num_labels = int((row["labels"] != IGNORED).sum()) if "labels" in row else 0
    if num_labels < length / 2:  # too few for a mean loss
        row["labels"] = ids.clone()
    if "position_ids" not in row:  # batches of examples are padded
        row["attention_mask"] = torch.ones_like(ids)
        row["attention_mask"][:, length - length // 8 :] = 0
    if "attention_mask" in row:
        row["labels"] = row["labels"].masked_fill(row["attention_mask"] == 0, IGNORED)
        return row
    positions = row["position_ids"]
    if packed and bool((positions.diff(dim=1) == 1).all()):
        middle = length // 2
        positions[:, middle:] = torch.arange(length - middle)
    return add_document_bounds(row) if packed else row


def largest_of_processes(difference: PartDifference) -> PartDifference:
    """Return the largest difference of all processes, the same on each of them."""
    if world_size() == 1:
        return difference
    differences: list[Any] = [None] * world_size()
    dist.all_gather_object(differences, difference)
    errors = [other.error for other in differences if other.error]
    return PartDifference(
        difference.key,
        loss=max(other.loss for other in differences),
        gradient=max(other.gradient for other in differences),
        error=errors[0] if errors else "",
    )


def compare_optimizer(trainer: "CPTTrainer") -> list[PartDifference]:
    """Compare updates by the optimizer's kernel with torch's operations on the CPU, on a copy of some weights."""
    optimizer = trainer.engine.optimizer
    if not isinstance(optimizer, OneKernelAdamW):
        return []
    automatic = optimizer.has_master and trainer.first_step == 0  # a checkpoint's states fit only its own dtype
    updates = largest_of_processes(compare_updates(optimizer, WEIGHTS_DTYPE if automatic else OPTIMIZER))
    return [updates] if updates.exceeds(UPDATE_TOLERANCE) else []


def compare_updates(optimizer: OneKernelAdamW, key: str) -> PartDifference:
    """Update a copy of some weights twice: by the optimizer's class on its device, and in plain operations on the CPU.

    The difference is that of the changes, relative to their norm.
    """
    group = optimizer.param_groups[0]
    parameter = max(group["params"], key=lambda weight: flat(weight).numel())
    weights = flat(parameter)[:MOST_UPDATED].clone()
    draw = torch.Generator().manual_seed(0)
    changes = []
    for kind, device in ((type(optimizer), weights.device), (OneKernelAdamW, torch.device("cpu"))):
        copy = nn.Parameter(weights.to(device, copy=True))
        # The changes of a usual learning rate, and weight decay, would be lost in half precision.
        options = {**group, "params": [copy], "lr": 1.0, "initial_lr": 1.0}
        updated = kind([options], rounding=optimizer.rounding, eight_bit=optimizer.eight_bit, **optimizer.defaults)
        draw.manual_seed(0)
        for _ in range(UPDATES):
            copy.grad = torch.randn(weights.shape, generator=draw).to(device, weights.dtype)
            updated.step()
        changes.append(copy.detach().cpu().float() - weights.cpu().float())
    made, expected = changes
    distance = float((made - expected).norm() / expected.norm())
    return PartDifference(key, gradient=distance if distance == distance else math.inf)


# --- fall back -------------------------------------------------------------------------------------------------------


def fall_back(trainer: "CPTTrainer", differing: Sequence[PartDifference]) -> None:
    """Remember plain values for the parts that differ, as events of the run.

    Raises:
        RecipeError: the recipe requires one of them.
        RestartNeeded: all others.
    """
    folder = trainer.run_folder
    written = read_recipe(folder / RECIPE)
    values = dict(PLAIN_VALUES)
    if attention_of(trainer.accelerator.unwrap_model(trainer.model).config) == "sdpa":
        values[ATTENTION] = "eager"
    machine = describe_machine()
    for difference in differing:
        key, value = difference.key, values[difference.key]
        if not is_automatic(written, key):
            remedy = f"Write `{key}: {json.dumps(value)}`"
            if key == OPTIMIZER:
                remedy = "Write `optimizer.name: adamw` and `model.dtype: float32`"
            raise RecipeError(
                f"{key}: on this machine {difference}. {remedy}, or `safety.first_batch_proof: false` to train anyway."
            )
    fallbacks = read_object(folder / LEARNED).get(FALLBACKS, {})
    for difference in differing:
        key, value = difference.key, values[difference.key]
        message = f"{key} is {json.dumps(value)} instead of auto, because on this machine {difference}."
        record_event(
            folder, "fallback", message, step=trainer.first_step, key=key, value=value, reason=str(difference)
        )
        fallbacks[key] = {"value": value, "reason": str(difference), "machine": machine}
    remember(folder, FALLBACKS, fallbacks)
    keys = ", ".join(difference.key for difference in differing)
    raise RestartNeeded(f"The run restarts with plain operations for {keys}.")


def with_fallbacks(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with plain values for the parts that differed on this machine, if their keys are `auto`."""
    fallbacks = read_object(folder / LEARNED).get(FALLBACKS, {})
    if not fallbacks:
        return recipe
    machine, content = describe_machine(), recipe.model_dump()
    for key, fallback in fallbacks.items():
        if fallback["machine"] != machine or not is_automatic(content, key):
            continue
        section, name = key.split(".")
        value = fallback["value"]
        if section == "training":
            update: Any = {**recipe.training, name: value}
        else:
            update = getattr(recipe, section).model_copy(update={name: value})
        recipe = recipe.model_copy(update={section: update})
        print_once(f"{key}: auto is {json.dumps(value)} here: {fallback['reason']}.")
    return recipe


def is_automatic(recipe: Mapping[str, Any], key: str) -> bool:
    section, name = key.split(".")
    values = recipe.get(section) or {}
    if key == COMPILING and wanted_compiling(values) is not None:
        return False
    return key != OPTIMIZER and values.get(name, AUTO) == AUTO


# --- what a proof holds for ------------------------------------------------------------------------------------------


def describe_machine() -> dict[str, Any]:
    """GPUs, driver, and versions of the libraries with kernels."""
    gpus = find_gpus()
    return {
        "gpus": sorted({gpu.name for gpu in gpus}),
        "driver": gpus[0].driver if gpus else None,
        "versions": {name: installed_version(name) for name in LIBRARIES},
        "code": hash_of_code(),
    }


def describe_parts(trainer: "CPTTrainer") -> dict[str, Any]:
    model = trainer.model
    return {
        "fast": sorted(fast_parts(model)),
        "attention": attention_of(trainer.accelerator.unwrap_model(model).config),
        "optimizer": trainer.recipe.optimizer.name,
        "dtypes": sorted({str(weight.dtype) for weight in model.parameters()}),
    }
