"""Prove before the first step that the fast parts of a run compute what torch's plain operations do, on this machine.

A part that differs is replaced at the next start if its key is `auto`; otherwise the run ends with the reason.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.memory import clear_device_cache
from peft import PeftModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, TrainingArguments

from cpt.checkpoints.sharding import FSDP, ZERO
from cpt.distributed import main_process_decides, print_once, world_size
from cpt.errors import RecipeError, RestartNeeded
from cpt.evaluation.scoring import evaluation_mode
from cpt.hardware import find_gpus
from cpt.hf_internals import IGNORED, attention_of
from cpt.models.attention import add_document_bounds, wants_bounds
from cpt.models.fast_parts import (
    ATTENTION,
    COMPILING,
    HALF,
    HALF_WITH_EXPERTS,
    LOSS,
    SINGLE,
    Gradients,
    PartDifference,
    compare_fast_parts,
)
from cpt.models.fused_loss import installed_loss
from cpt.models.layers import has_experts, read_recomputing, wanted_compiling
from cpt.optim.adamw import OneKernelAdamW, flat
from cpt.recipe.keys import AUTO
from cpt.recipe.schema import Recipe
from cpt.runs.events import record_event
from cpt.runs.folder import RECIPE, read_recipe
from cpt.runs.history import read_learned
from cpt.runs.record import hash_of_code, installed_version
from cpt.training.restart import remember

MOST_TOKENS = 512
# weights of the copy that the optimizer's kernel updates
MOST_UPDATED = 8192
UPDATES = 3
MOST_OF_UPDATE = 0.02  # difference of updates, relative to their norm
WEIGHTS_DTYPE = "model.dtype"
OPTIMIZER = "optimizer.name"
PLAIN_VALUES = {
    LOSS: False,
    COMPILING: False,
    ATTENTION: "sdpa",
    WEIGHTS_DTYPE: "float32",  # torch's own kernel updates them
    OPTIMIZER: "adamw",
}
# in learned.json
FALLBACKS = "fallbacks"
PROVEN = "first_batch"
LIBRARIES = ("torch", "triton", "transformers", "accelerate", "flash-attn")


def prove_first_batch(
    recipe: Recipe,
    model: nn.Module,
    arguments: TrainingArguments,
    *,
    optimizer: torch.optim.Optimizer,
    sharding: str,
    begins: bool,
    first_row: Callable[[], Any] | None,
) -> None:
    """Compare the fast parts with plain operations, once model and optimizer are prepared.

    Args:
        model: prepared, but not wrapped.
        sharding: of the model over processes (`cpt.checkpoints.sharding`).
        begins: the run does not resume.
        first_row: reads the first row of this process; None if processes share rows.

    Raises:
        RestartNeeded: a part differs whose key is `auto`: the next start uses another value.
        RecipeError: a part differs that the recipe requires.
    """
    requested = recipe.safety.first_batch_proof
    is_fast = arguments.device.type == "cuda" or installed_loss(model) is not None
    if requested is False or (requested == "auto" and not is_fast):
        return
    folder = Path(str(arguments.output_dir))
    sections = recipe.model_dump(mode="json", include={"model", "training", "optimizer"})
    proof = {**describe_machine(), **sections}
    if main_process_decides(lambda: read_learned(folder).get(PROVEN) == proof):
        return  # resumed on an equal machine
    differing = compare_first_row(
        model,
        arguments,
        longest_row=recipe.data.sequence_length,
        sharding=sharding,
        first_row=first_row,
    )
    if isinstance(optimizer, OneKernelAdamW):
        differing += compare_optimizer(optimizer, begins=begins)
    clear_device_cache(garbage_collection=True)
    if differing:
        main_process_decides(lambda: fall_back(folder, differing, model))
    main_process_decides(lambda: remember(folder, PROVEN, proof))
    print_once("First batch: what was compared agrees with torch's plain operations.")


def compare_first_row(
    model: nn.Module,
    arguments: TrainingArguments,
    *,
    longest_row: int,
    sharding: str,
    first_row: Callable[[], Any] | None,
) -> list[PartDifference]:
    """Compare the model's fast parts on this process's first row; the largest difference of all processes counts."""
    # Whole logits and attention scores of half a micro-batch need no more memory than a step.
    micro_batch = arguments.per_device_train_batch_size
    longest = min(MOST_TOKENS, micro_batch * longest_row // 2)
    row = None
    if first_row is not None:
        row = start_of_row(first_row(), longest, packed=wants_bounds(model))
    has_head = (
        isinstance(model, PreTrainedModel | PeftModel) and model.get_output_embeddings() is not None
    )
    if row is None or not has_head:
        print_once(
            "First batch: only the optimizer is compared: this stage has no whole rows of a language model."
        )
        return []
    tolerance = HALF_WITH_EXPERTS if has_experts(model) else HALF
    is_rounded = (
        arguments.bf16 or arguments.fp16 or torch.get_float32_matmul_precision() != "highest"
    )
    if not is_rounded and {weight.dtype for weight in model.parameters()} == {torch.float32}:
        tolerance = SINGLE
    gradients: Gradients = "returned"
    recomputing = read_recomputing(vars(arguments)).of_torch
    if sharding == FSDP:
        gradients = "accumulated"
    elif sharding == f"{ZERO}3" or recomputing.get("use_reentrant"):
        gradients = "none"  # hooks or reentrant checkpoints need a whole backward pass
    batch = {name: torch.as_tensor(value).to(arguments.device) for name, value in row.items()}
    differing = compare_fast_parts(
        model, batch, tolerance, gradients=gradients, everywhere=largest_of_processes
    )
    return differing or compare_large_logits(model, batch)


def compare_large_logits(model: nn.Module, row: dict[str, Any]) -> list[PartDifference]:
    """Compare what the model does with large logits: new weights have small ones, which a cap leaves as they are."""
    fused = installed_loss(model)
    batch = dict(row)
    if fused is None:
        return []
    labels = batch.pop("labels")
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    with evaluation_mode(model):
        scores = fused.score(inner, batch, labels)
    reason = "the model changes its logits after the head"
    if scores is not None:
        return []
    return [PartDifference(LOSS, error=reason)]


def start_of_row(example: Any, longest: int, *, packed: bool) -> dict[str, Any] | None:
    """Return the first tokens of a row as a batch of one row; None if the example has none, such as a prompt's text.

    Args:
        packed: kernels keep documents apart. If the first tokens are of one document, they become two documents, so
            that the kernel for several is compared.
    """
    columns = dict(example)
    if "prompt_ids" in columns:
        ids = (columns["prompt_ids"] + columns.get("chosen_ids", columns.get("completion_ids")))[
            :longest
        ]
        padding = len(ids) // 8  # batches of examples are padded
        mask = [1] * (len(ids) - padding) + [0] * padding
        columns = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    names = columns.keys() & {"input_ids", "position_ids", "attention_mask"}
    if "input_ids" not in names:
        return None
    # A row of `packing: token_budget` is a batch.
    row = {name: torch.atleast_2d(columns[name])[:1, :longest].clone() for name in names}
    row["labels"] = row["input_ids"].clone()
    if "attention_mask" in row:
        row["labels"][row["attention_mask"] == 0] = IGNORED
    elif packed and bool((row["position_ids"].diff() == 1).all()):
        second = row["position_ids"][:, longest // 2 :]
        second -= second[:, :1].clone()
    if packed:
        return add_document_bounds(row)
    return row


def largest_of_processes(difference: PartDifference) -> PartDifference:
    differences = [difference] * world_size()
    if world_size() > 1:
        dist.all_gather_object(differences, difference)
    return max(
        differences, key=lambda other: max(other.loss / HALF.loss, other.gradient / HALF.gradient)
    )


def compare_optimizer(optimizer: OneKernelAdamW, *, begins: bool) -> list[PartDifference]:
    """Compare updates by the optimizer's kernel with torch's operations on the CPU, on a copy of some weights."""
    distance = difference_of_updates(optimizer)
    # a checkpoint's states fit only its own dtype
    key = WEIGHTS_DTYPE if optimizer.has_master and begins else OPTIMIZER
    updates = largest_of_processes(PartDifference(key, gradient=distance))
    if updates.gradient > MOST_OF_UPDATE:
        return [updates]
    return []


def difference_of_updates(optimizer: OneKernelAdamW) -> float:
    """Return how far updates by the optimizer's class are from those by plain operations, relative to their norm."""
    group = optimizer.param_groups[0]
    weights = max(map(flat, group["params"]), key=len)[:MOST_UPDATED].clone()
    gradients = torch.randn(UPDATES, len(weights), generator=torch.Generator().manual_seed(0)).to(
        weights.dtype
    )
    changes = []
    for kind, device in ((type(optimizer), weights.device), (OneKernelAdamW, "cpu")):
        copy = nn.Parameter(weights.to(device, copy=True))
        # The changes of a usual learning rate, and weight decay, would be lost in half precision.
        options = {**group, "params": [copy], "lr": 1.0}
        updated = kind([options], rounding=optimizer.rounding, **optimizer.defaults)
        for gradient in gradients:
            copy.grad = gradient.to(device)
            updated.step()
        changes.append((copy.detach() - weights.to(device)).cpu().float())
    distance = float((changes[0] - changes[1]).norm() / changes[1].norm())
    if math.isfinite(distance):
        return distance
    return math.inf


# --- fall back -------------------------------------------------------------------------------------------------------


def fall_back(folder: Path, differing: list[PartDifference], model: Any) -> None:
    """Remember plain values for the parts that differ, as events of the run.

    Raises:
        RecipeError: the recipe requires one of them.
        RestartNeeded: all others.
    """
    recipe_as_written = read_recipe(folder / RECIPE)
    fallbacks = read_learned(folder).get(FALLBACKS, {})
    # Keys that the recipe requires come first: they end the run.
    for difference in sorted(
        differing, key=lambda other: is_automatic(recipe_as_written, other.key)
    ):
        key = difference.key
        reason = f"on this machine {difference}"
        value = PLAIN_VALUES[key]
        if key == ATTENTION and attention_of(model.config) == "sdpa":
            value = "eager"
        remedy = f"{key}: {json.dumps(value)}"
        if not is_automatic(recipe_as_written, key):
            if key == OPTIMIZER:
                remedy += f"` and `{WEIGHTS_DTYPE}: float32"
            raise RecipeError(
                f"{key}: {reason}. Write `{remedy}`, or `safety.first_batch_proof: false` to train anyway."
            )
        record_event(
            folder,
            "fallback",
            f"{remedy} instead of auto: {reason}.",
            key=key,
            value=value,
            reason=reason,
        )
        fallbacks[key] = {"value": value, "reason": reason, "machine": describe_machine()}
    remember(folder, FALLBACKS, fallbacks)
    raise RestartNeeded(f"The run restarts with plain operations for {', '.join(fallbacks)}.")


def with_fallbacks(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with plain values for the parts that differed on this machine, if their keys are `auto`."""
    for key, fallback in read_learned(folder).get(FALLBACKS, {}).items():
        if fallback["machine"] == describe_machine() and is_automatic(recipe.model_dump(), key):
            section, name = key.split(".")
            update = {name: fallback["value"]}
            values = getattr(recipe, section)
            if section == "training":
                changed = {**values, **update}
            else:
                changed = values.model_copy(update=update)
            recipe = recipe.model_copy(update={section: changed})
            print_once(
                f"{key}: auto is {json.dumps(fallback['value'])} here: {fallback['reason']}."
            )
    return recipe


def is_automatic(recipe: Mapping[str, Any], key: str) -> bool:
    section, name = key.split(".")
    values = recipe.get(section) or {}
    return values.get(name, AUTO) == AUTO and key != OPTIMIZER and wanted_compiling(values) is None


def describe_machine() -> dict[str, Any]:
    """GPUs, driver, and versions of the libraries with kernels."""
    return {
        "gpus": sorted({f"{gpu.name}, driver {gpu.driver}" for gpu in find_gpus()}),
        "versions": {name: installed_version(name) for name in LIBRARIES},
        "code": hash_of_code(),
    }
