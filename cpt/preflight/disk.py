"""Room on the disk for all that a run will keep there at once: its checkpoints, one more while it is written, and the
exported model."""

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from cpt.cache import size_of
from cpt.errors import ResourceError
from cpt.hardware import GIB, free_disk_gib
from cpt.models.build import DTYPES
from cpt.models.inventory import count_model_parameters
from cpt.optim.adamw import DEFAULT_ROUNDING, automatic_dtype
from cpt.recipe.schema import Recipe

MOMENTS: dict[str, float] = {"adamw": 8, "adamw_8bit": 3, "paged_adamw_8bit": 3, "sgd": 0}
"""Bytes for each trained parameter, of 8-bit ones with the embedding's in full; of an optimizer that is not known,
none are asked for."""
OF_ROUNDING = {"kahan": 2, "stochastic": 0}
LAST = 3  # of the rule `newest`


@dataclass(frozen=True)
class DiskNeeds:
    """What a run takes at its largest, in bytes; an estimate from below."""

    checkpoint: int
    export: int
    checkpoints_at_once: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.checkpoints_at_once * self.checkpoint + self.export


def disk_needs(recipe: Recipe, parameters: int, *, with_master_weights: bool, on_gpu: bool = False) -> DiskNeeds:
    """What the recipe's run will take.

    Args:
        parameters: of the model.
        with_master_weights: DeepSpeed keeps them, in fp32, and writes the weights once more among its own states.
    """
    automatic = automatic_dtype(recipe, deepspeed=with_master_weights, on_gpu=on_gpu)
    bytes_each = DTYPES.get(recipe.model.dtype, automatic).itemsize
    half = bytes_each == 2
    export = parameters * bytes_each
    if recipe.model.lora is not None:  # adapters are small beside the model that they are merged into
        return DiskNeeds(0, export, checkpoints_at_once(recipe))
    states = MOMENTS.get(recipe.optimizer.name, 0) + (
        4 + bytes_each if with_master_weights else beside_half(recipe) if half else 0
    )
    parts = bytes_each if recipe.training.get("fsdp") else 0  # FSDP's weights once more, each process its own
    return DiskNeeds(export + round(parameters * (states + parts)), export, checkpoints_at_once(recipe))


def beside_half(recipe: Recipe) -> int:
    """Bytes for each weight in half precision: of its master copy, or of what rounding took."""
    name, rounding = recipe.optimizer.name, recipe.optimizer.options.get("rounding")
    if name in ("adamw_8bit", "paged_adamw_8bit"):
        return OF_ROUNDING.get(rounding or DEFAULT_ROUNDING, 0)
    return 0 if name != "adamw" else 4 if rounding is None else OF_ROUNDING.get(rounding, 0)


def checkpoints_at_once(recipe: Recipe) -> int:
    """How many lie on the disk while one more is written, as far as the recipe tells."""
    section = recipe.checkpoints
    saves: float = math.inf
    if section.every_tokens is None and section.every_steps is None:
        saves = 1
    elif section.every_steps is not None and section.every_steps < 1:
        saves = math.ceil(1 / section.every_steps)
    elif recipe.budget.tokens is not None:
        tokens_between = section.every_tokens or int(section.every_steps or 1) * (
            recipe.budget.global_batch_tokens or 0
        )
        saves = math.ceil(recipe.budget.tokens / tokens_between) if tokens_between else math.inf
    if section.kept is None:
        return 1 if saves == math.inf else int(saves)
    kept = section.kept.options.get("last", LAST) if section.kept.name == "newest" else 1
    return int(min(saves, kept + 1))


def small_disk(recipe: Recipe, model: PreTrainedModel, *, with_master_weights: bool) -> ResourceError | None:
    """The complaint about a disk that will be full before the run ends; what the run has there already counts as taken
    care of."""
    parameters = count_model_parameters(model).total
    on_gpu = torch.cuda.is_available() and not recipe.training.get("use_cpu")
    needs = disk_needs(recipe, parameters, with_master_weights=with_master_weights, on_gpu=on_gpu)
    folder = recipe.output_dir / recipe.name
    free = free_disk_gib(folder)
    there = sum(size_of(path) for pattern in ("checkpoint-*", "final") for path in folder.glob(pattern)) / GIB
    if needs.total / GIB <= free + there:
        return None
    count = needs.checkpoints_at_once
    each = f" of {needs.checkpoint / GIB:.1f} GiB each" if count > 1 else ""
    return ResourceError(
        f"`output_dir`: {recipe.output_dir} has {free:.0f} GiB free; the model of {parameters / 1e9:.2f}B parameters"
        f" and {count} checkpoint{'s' if count > 1 else ''}{each}, one of them being written, take about"
        f" {needs.total / GIB:.0f} GiB (an estimate). Free some, choose another"
        f" disk{', or lower `checkpoints.keep`' if count > 2 else ''}."
    )
