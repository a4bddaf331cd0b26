"""Put values in the place of `auto`, for the machine and the processes that are here."""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from cpt.errors import RecipeError, ResourceError
from cpt.hardware import find_gpus, host_memory_gib
from cpt.models.compiled import check_compiling
from cpt.models.config import load_config
from cpt.models.inventory import build_on_meta
from cpt.parallelism import groups_of_rows
from cpt.planner.activations import count_activations
from cpt.planner.automatic import chosen_values
from cpt.planner.compiling import compiles
from cpt.planner.setup import Setup, attention_on_gpu, setup_of
from cpt.planner.stage_terms import facts_for
from cpt.planner.target import Target, peak_of
from cpt.ranks import main_process_decides, num_nodes, tell, world_size
from cpt.recipe.automatic import ACCUMULATION, AUTO, CHECKPOINTING, COMPILING, LOADING, MICRO_BATCH, automatic_keys
from cpt.recipe.schema import Recipe
from cpt.stages.deepspeed_profile import Profile, read_profile, zero_section

ANY = {
    MICRO_BATCH: 1,
    ACCUMULATION: 1,
    **dict.fromkeys(CHECKPOINTING, False),
    **dict.fromkeys(LOADING, 0),
    COMPILING: False,
}


def with_chosen_values(
    recipe: Recipe,
    *,
    deepspeed: str | Profile | None = None,
    config: PreTrainedConfig | None = None,
    target: Target | None = None,
    processes: int | None = None,
    nodes: int | None = None,
    share: float = 1.0,
) -> Recipe:
    """The recipe with numbers where it says `auto`, each of them told; the same one where it says it nowhere.

    Args:
        deepspeed: the profile in force, where it is not the recipe's.
        config: of the model, where the caller has it.
        target: the machine that is meant; by default the one that this process is on.
        processes: by default those that run now.
        nodes: machines that hold them, likewise.
        share: of a GPU's memory that the run may have.

    Raises:
        RecipeError: the model's memory cannot be planned.
        ResourceError: the model's config cannot be had.
    """
    number = processes or world_size()
    recipe = with_compiling(recipe, deepspeed, config, target, number)
    if not automatic_keys(recipe.training):
        return recipe
    values = main_process_decides(
        partial(values_here, recipe, deepspeed, config, target, number, nodes or nodes_here(), share)
    )
    for key in automatic_keys(recipe.training):
        value = values[key]
        tell(
            f"training.{key}: auto is {'decided by the others' if value is None else value}"
            f" {'here' if target is None else 'there'}."
        )
    training = {key: values.get(key, value) for key, value in recipe.training.items()}
    return recipe.model_copy(
        update={"training": {key: value for key, value in training.items() if key not in values or value is not None}}
    )


def with_compiling(
    recipe: Recipe,
    deepspeed: str | Profile | None,
    config: PreTrainedConfig | None,
    target: Target | None,
    processes: int,
) -> Recipe:
    """The recipe with `torch_compile` decided, where it leaves that open; on a CPU it is off, and not worth a line."""
    if recipe.training.get(COMPILING, AUTO) != AUTO:
        return recipe
    on_cpu = runs_on_cpu(recipe, target)
    if on_cpu and COMPILING not in recipe.training:
        return recipe
    is_on, reason = main_process_decides(partial(compiling_there, recipe, deepspeed, config, target, processes))
    if not on_cpu:
        tell(f"training.{COMPILING}: auto is {str(is_on).lower()} {'here' if target is None else 'there'}: {reason}.")
    return recipe.model_copy(update={"training": {**recipe.training, COMPILING: is_on}})


def compiling_there(
    recipe: Recipe,
    deepspeed: str | Profile | None,
    config: PreTrainedConfig | None,
    target: Target | None,
    processes: int,
) -> tuple[bool, str]:
    """Whether layers are compiled on the machine that is meant, and the reason."""
    given = deepspeed or recipe.training.get("deepspeed")
    zero3 = given is not None and zero_section(read_profile(given)).get("stage") == 3
    on_cpu, model = runs_on_cpu(recipe, target), None
    if not on_cpu:
        with suppress(Exception):  # of a model's own code; the gate reports it
            model = build_on_meta(config if config is not None else load_config(recipe.model))
    is_on, reason = compiles(recipe, zero3=zero3, on_cpu=on_cpu, model=model)
    if not is_on or target is not None:
        return is_on, reason
    if processes == 1 and torch.cuda.device_count() > 1:
        return False, "without a launcher torch's DataParallel copies the model to each GPU"
    try:
        check_compiling({COMPILING: True}, zero3=zero3, has_gpu=True)
    except ResourceError as missing:
        return False, str(missing).removesuffix(".")
    return True, reason


def runs_on_cpu(recipe: Recipe, target: Target | None) -> bool:
    """Whether no GPU takes part."""
    return (
        target.on_cpu if target is not None else bool(recipe.training.get("use_cpu")) or not torch.cuda.is_available()
    )


def with_any_values(recipe: Recipe) -> Recipe:
    """The recipe with numbers that nobody chose, for whoever only looks at other keys."""
    asked = automatic_keys(recipe.training)
    training = {key: ANY[key] if key in asked else value for key, value in recipe.training.items()}
    return recipe.model_copy(update={"training": training})


def values_here(
    recipe: Recipe,
    deepspeed: str | Profile | None,
    config: PreTrainedConfig | None,
    target: Target | None,
    processes: int,
    nodes: int,
    share: float,
) -> Mapping[str, Any]:
    """What is chosen, by key; None leaves a key out."""
    asked = automatic_keys(recipe.training)
    if MICRO_BATCH in asked and recipe.training.get("steps_per_generation") is not None:
        raise RecipeError(
            f"`training.{MICRO_BATCH}: auto`: with `steps_per_generation` it decides how many completions are sampled"
            " at once. Write a number, or `generation_batch_size` in place of `steps_per_generation`."
        )
    told = with_any_values(recipe)
    profile = deepspeed or recipe.training.get("deepspeed")
    shape = config if config is not None else load_config(recipe.model)
    on_cpu = runs_on_cpu(recipe, target)
    attention = "sdpa" if on_cpu and recipe.model.attention == "auto" else attention_on_gpu(told, shape)
    setup = setup_of(
        told, processes, read_profile(profile) if profile else None, attention=attention, on_cpu=on_cpu, nodes=nodes
    )
    rows = (recipe.budget.global_batch_tokens or 0) // (
        recipe.data.sequence_length * groups_of_rows(recipe.training, processes)
    )

    def count(of: Setup) -> Any:
        return facts_for(shape, of), count_activations(shape, of)

    try:
        return chosen_values(
            recipe.training,
            setup,
            target or this_machine(processes, on_cpu=on_cpu),
            count,
            rows=max(1, rows),
            share=share,
        )
    except Exception as problem:  # of a model's own code
        raise RecipeError(
            f"`training.{asked[0]}: auto`: how much memory the model takes could not be planned"
            f" ({type(problem).__name__}: {problem}). Write a number; `cpt rehearse` tries it."
        ) from problem


def nodes_here() -> int:
    """Machines of the run that this process is part of; 1 where they are not alike."""
    return num_nodes() if world_size() % num_nodes() == 0 else 1


def this_machine(processes: int, *, on_cpu: bool) -> Target:
    """Its smallest GPU, or what a process has of its own memory."""
    memory = host_memory_gib()
    gpus = [] if on_cpu else find_gpus()
    if not gpus:
        return Target("CPU", 0, memory / processes, 1.0, "", memory, "this machine")
    smallest = min(gpus, key=lambda gpu: gpu.memory_gib)
    return Target(smallest.name, processes, smallest.memory_gib, peak_of(smallest.name), "", memory, "this machine")
