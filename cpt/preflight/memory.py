"""Whether the run fits the GPUs that are here, by the planner; an estimate, so it warns and does not refuse."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from cpt.hardware import GIB, Gpu, host_memory_gib
from cpt.planner.activations import count_activations
from cpt.planner.advice import fits
from cpt.planner.memory import MemoryPlan, plan_memory
from cpt.planner.setup import attention_on_gpu, setup_of
from cpt.planner.speed import assumed_mfu, planned_speed
from cpt.planner.stage_terms import facts_for
from cpt.planner.target import Target, peak_of
from cpt.preflight.automatic import nodes_here
from cpt.preflight.found import PreflightReport
from cpt.ranks import world_size
from cpt.recipe.schema import Recipe


def check_memory(
    recipe: Recipe,
    config: PreTrainedConfig,
    profile: Mapping[str, Any] | None,
    gpus: list[Gpu],
    found: PreflightReport,
) -> None:
    """Note the plan, and warn where it probably does not fit; on a machine without a GPU nothing is planned."""
    if not gpus or recipe.training.get("use_cpu"):
        return
    smallest = min(gpus, key=lambda gpu: gpu.memory_gib)
    target = Target(
        smallest.name, world_size(), smallest.memory_gib, peak_of(smallest.name), "", host_memory_gib(), "this machine"
    )
    nodes = nodes_here()
    try:
        setup = setup_of(recipe, world_size(), profile, attention=attention_on_gpu(recipe, config), nodes=nodes)
        facts, activations = facts_for(config, setup), count_activations(config, setup)
    except (
        Exception
    ) as problem:  # of a model's own code, or of a teacher that is not there: an estimate must not stop a run
        why = f"({type(problem).__name__}: {problem})"
        found.unchecked.append(f"`model`: how much memory it takes {why}. `cpt rehearse` tries it")
        return
    plan = plan_memory(facts, setup, activations, snapshot=recipe.checkpoints.in_background)
    mfu = assumed_mfu(setup)
    found.plan = described(plan, target, nodes, planned_speed(facts, setup, target, mfu).tokens_per_second, mfu)
    if not fits(plan, target):
        gpu = f"{plan.peak.size / GIB:.1f} GiB of a {smallest.name}, which has {smallest.memory_gib:.0f}"
        host = f"{plan.host.size / GIB:.0f} GiB of the host, which has {target.host_memory_gib:.0f}"
        found.warnings.append(
            f"`training`: by plan it takes {gpu}, and {host}. `cpt plan` shows the parts, and what would fit"
        )


def described(plan: MemoryPlan, target: Target, nodes: int, tokens_per_second: float, mfu: float) -> dict[str, Any]:
    """The plan in the words of a run's record: GiB of one GPU at the moment that takes most and of one node, the speed
    of the whole job."""
    return {
        "gpu": target.name,
        "gpus": target.gpus,
        "nodes": nodes,
        "gpu_has_gib": round(target.memory_gib, 2),
        "moment": plan.peak.name,
        "gpu_memory_gib": {term.name: round(term.size / GIB, 4) for term in plan.peak.terms},
        "gpu_total_gib": round(plan.peak.size / GIB, 3),
        "host_total_gib": round(plan.host.size / GIB, 3),
        "tokens_per_second": round(tokens_per_second, 1),
        "assumed_mfu": mfu,
    }
