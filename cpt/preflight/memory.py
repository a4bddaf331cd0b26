"""Whether the run fits the GPUs that are here, by the planner; an estimate, so it warns and does not refuse."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from cpt.hardware import GIB, Gpu, host_memory_gib
from cpt.planner.activations import count_activations
from cpt.planner.advice import fits
from cpt.planner.memory import plan_memory
from cpt.planner.setup import attention_on_gpu, setup_of
from cpt.planner.stage_terms import facts_for
from cpt.planner.target import Target
from cpt.ranks import world_size
from cpt.recipe.schema import Recipe


def memory_warning(recipe: Recipe, config: PreTrainedConfig, profile: Mapping[str, Any] | None, gpus: list[Gpu]) -> str | None:
    """What is said where it probably does not fit; None on a machine without a GPU."""
    if not gpus or recipe.training.get("use_cpu"):
        return None
    smallest = min(gpus, key=lambda gpu: gpu.memory_gib)
    target = Target(smallest.name, world_size(), smallest.memory_gib, 1.0, "", host_memory_gib(), "this machine")
    try:
        setup = setup_of(recipe, world_size(), profile, attention=attention_on_gpu(recipe, config))
        facts, activations = facts_for(config, setup), count_activations(config, setup)
    except Exception as problem:  # of a model's own code, or of a teacher that is not there: an estimate must not stop a run
        return f"`model`: how much memory it takes could not be planned ({type(problem).__name__}: {problem}). `cpt rehearse` tries it"
    plan = plan_memory(facts, setup, activations, snapshot=recipe.checkpoints.in_background)
    if fits(plan, target):
        return None
    gpu = f"{plan.peak.size / GIB:.1f} GiB of a {smallest.name}, which has {smallest.memory_gib:.0f}"
    host = f"{plan.host.size / GIB:.0f} GiB of the host, which has {target.host_memory_gib:.0f}"
    return f"`training`: by plan it takes {gpu}, and {host}. `cpt plan` shows the parts, and what would fit"
