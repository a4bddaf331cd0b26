"""Whether the run fits this machine: its disk, by sizes, and its GPUs, by plan, which only warns."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from cpt.cache import size_of
from cpt.errors import ResourceError
from cpt.hardware import GIB, Gpu, free_disk_gib
from cpt.models.build import DTYPES
from cpt.models.inventory import count_model_parameters
from cpt.optim.adamw import DEFAULT_ROUNDING, automatic_dtype
from cpt.planner.activations import count_activations
from cpt.planner.advice import fits
from cpt.planner.memory import facts_for, plan_memory
from cpt.planner.setup import attention_on_gpu, setup_of
from cpt.planner.speed import assumed_mfu, planned_speed
from cpt.planner.terms import IN_8_BIT
from cpt.preflight.automatic import nodes_here, this_machine
from cpt.preflight.found import PreflightReport
from cpt.ranks import world_size
from cpt.recipe.schema import Recipe

# Bytes for each trained parameter, of 8-bit ones with the embedding's in full; unknown optimizers count as none.
MOMENTS: dict[str, float] = {"adamw": 8, "adamw_8bit": 3, "paged_adamw_8bit": 3, "sgd": 0}
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
        return self.checkpoints_at_once * self.checkpoint + self.export


def disk_needs(recipe: Recipe, parameters: int, *, with_master_weights: bool, on_gpu: bool = False) -> DiskNeeds:
    """Sizes of checkpoints and of the exported model.

    Args:
        with_master_weights: DeepSpeed has fp32 weights, and writes the weights once more among its own states.
    """
    automatic = automatic_dtype(recipe, deepspeed=with_master_weights, on_gpu=on_gpu)
    bytes_each = DTYPES.get(recipe.model.dtype, automatic).itemsize
    export = parameters * bytes_each
    if recipe.model.lora is not None:  # adapters are small beside the model that they are merged into
        return DiskNeeds(0, export, checkpoints_at_once(recipe))
    states = MOMENTS.get(recipe.optimizer.name, 0)
    if with_master_weights:
        states += 4 + bytes_each
    elif bytes_each == 2:  # a master copy, or what rounding keeps
        name, rounding = recipe.optimizer.name, recipe.optimizer.options.get("rounding")
        rounding = rounding or (DEFAULT_ROUNDING if name in IN_8_BIT else None)
        if name in ("adamw", *IN_8_BIT):
            states += 4 if rounding is None else OF_ROUNDING.get(rounding, 0)
    parts = bytes_each if recipe.training.get("fsdp") else 0  # FSDP's weights once more, each process its own
    return DiskNeeds(export + round(parameters * (states + parts)), export, checkpoints_at_once(recipe))


def checkpoints_at_once(recipe: Recipe) -> int:
    """How many are on the disk while one more is written, as far as the recipe says."""
    section = recipe.checkpoints
    saves: float = math.inf
    if section.every_tokens is None and section.every_steps is None:
        saves = 1
    elif section.every_steps is not None and section.every_steps < 1:
        saves = math.ceil(1 / section.every_steps)
    elif recipe.budget.tokens is not None:
        of_step = recipe.budget.global_batch_tokens or 0
        tokens_between = section.every_tokens or int(section.every_steps or 1) * of_step
        saves = math.ceil(recipe.budget.tokens / tokens_between) if tokens_between else math.inf
    if section.kept is None:
        return 1 if saves == math.inf else int(saves)
    kept = section.kept.options.get("last", LAST) if section.kept.name == "newest" else 1
    return int(min(saves, kept + 1))


def check_disk(recipe: Recipe, model: PreTrainedModel, *, with_master_weights: bool) -> None:
    """Raises:
    ResourceError: the disk will be full before the run ends.
    """
    parameters = count_model_parameters(model).total
    on_gpu = torch.cuda.is_available() and not recipe.training.get("use_cpu")
    needs = disk_needs(recipe, parameters, with_master_weights=with_master_weights, on_gpu=on_gpu)
    folder = recipe.output_dir / recipe.name
    free = free_disk_gib(folder)
    there = sum(size_of(path) for pattern in ("checkpoint-*", "final") for path in folder.glob(pattern)) / GIB
    if needs.total / GIB <= free + there:
        return
    count = needs.checkpoints_at_once
    raise ResourceError(
        f"`output_dir`: {recipe.output_dir} has {free:.0f} GiB free, and the run takes about"
        f" {needs.total / GIB:.0f} GiB: {count} checkpoint{'s' if count > 1 else ''} of"
        f" {needs.checkpoint / GIB:.1f} GiB, one of them being written, and the model. Free some, or choose another"
        f" disk{', or lower `checkpoints.keep`' if count > 2 else ''}."
    )


def check_memory(
    recipe: Recipe,
    config: PreTrainedConfig,
    profile: Mapping[str, Any] | None,
    gpus: list[Gpu],
    found: PreflightReport,
) -> None:
    """Note the plan, and warn if it does not fit; nothing is planned without a GPU."""
    if not gpus or recipe.training.get("use_cpu"):
        return
    target, nodes = this_machine(world_size(), on_cpu=False, gpus=gpus), nodes_here()
    try:
        setup = setup_of(recipe, world_size(), profile, attention=attention_on_gpu(recipe, config), nodes=nodes)
        facts, activations = facts_for(config, setup), count_activations(config, setup)
    except Exception as problem:  # of a model's own code, or a missing teacher: an estimate must not stop a run
        why = f"({type(problem).__name__}: {problem})"
        found.unchecked.append(f"`model`: how much memory it takes {why}. `cpt rehearse` tries it")
        return
    plan = plan_memory(facts, setup, activations, snapshot=recipe.checkpoints.in_background)
    mfu = assumed_mfu(setup)
    found.plan = {  # for the run's record
        "gpu": target.name,
        "gpus": target.gpus,
        "nodes": nodes,
        "gpu_has_gib": round(target.memory_gib, 2),
        "moment": plan.peak.name,
        "gpu_memory_gib": {term.name: round(term.size / GIB, 4) for term in plan.peak.terms},
        "gpu_total_gib": round(plan.peak.size / GIB, 3),
        "host_total_gib": round(plan.host.size / GIB, 3),
        "tokens_per_second": round(planned_speed(facts, setup, target, mfu).tokens_per_second, 1),
        "assumed_mfu": mfu,
    }
    if not fits(plan, target):
        gpu = f"{plan.peak.size / GIB:.1f} GiB of a {target.name}, which has {target.memory_gib:.0f}"
        host = f"{plan.host.size / GIB:.0f} GiB of the host, which has {target.host_memory_gib:.0f}"
        found.warnings.append(
            f"`training`: by plan it takes {gpu}, and {host}. `cpt plan` shows the parts, and what would fit"
        )
