"""What `auto` under `training:` means on a machine: the fastest micro-batch and checkpointing that fit by plan."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedConfig

from cpt.errors import RecipeError, ResourceError
from cpt.hardware import Gpu, find_gpus, host_memory_gib
from cpt.models.compiled import check_compiling
from cpt.models.config import load_config
from cpt.models.inventory import build_on_meta
from cpt.parallelism import groups_of_rows
from cpt.planner.activations import Counted, count_activations
from cpt.planner.advice import CAREFUL, HALVED, fits
from cpt.planner.compiling import compiles
from cpt.planner.facts import ModelFacts
from cpt.planner.memory import facts_for, plan_memory
from cpt.planner.setup import Setup, attention_on_gpu, setup_of
from cpt.planner.speed import assumed_mfu, planned_speed
from cpt.planner.target import Target, peak_of
from cpt.ranks import main_process_decides, num_nodes, tell, world_size
from cpt.recipe.automatic import ACCUMULATION, AUTO, CHECKPOINTING, COMPILING, LOADING, MICRO_BATCH, automatic_keys
from cpt.recipe.schema import Recipe
from cpt.stages.deepspeed_profile import Profile, read_profile, zero_section

BUSY_TOKENS = 32_768  # in a micro-batch: more keep no GPU busier
PLACEHOLDERS = {
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
    """The recipe with values in place of `auto`, each of them printed.

    Args:
        deepspeed: the profile in force, if it is not the recipe's.
        config: of the model; by default it is loaded.
        target: the machine to plan for; by default this one.
        processes: by default those that run now.
        nodes: machines that hold them, likewise.
        share: of a GPU's memory that the run may have.

    Raises:
        RecipeError: the model's memory cannot be planned.
        ResourceError: the model's config cannot be read.
    """
    number = processes or world_size()
    recipe = with_compiling(recipe, deepspeed, config, target, number)
    asked = automatic_keys(recipe.training)
    if not asked:
        return recipe
    values = main_process_decides(
        partial(values_here, recipe, deepspeed, config, target, number, nodes or nodes_here(), share)
    )
    where = "here" if target is None else "there"
    for key in asked:
        value = "decided by the others" if values[key] is None else values[key]
        tell(f"training.{key}: auto is {value} {where}.")
    training = {key: values.get(key, value) for key, value in recipe.training.items()}
    left = {key: value for key, value in training.items() if key not in values or value is not None}
    return recipe.model_copy(update={"training": left})


def with_compiling(
    recipe: Recipe,
    deepspeed: str | Profile | None,
    config: PreTrainedConfig | None,
    target: Target | None,
    processes: int,
) -> Recipe:
    """The recipe with `torch_compile` decided; on a CPU it is off, without a line if the recipe does not name it."""
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
    """Whether layers are compiled on that machine, and the reason."""
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
    if target is not None:
        return target.on_cpu
    return bool(recipe.training.get("use_cpu")) or not torch.cuda.is_available()


def with_placeholders(recipe: Recipe) -> Recipe:
    """The recipe with any numbers in place of `auto`, for checks of its other keys."""
    asked = automatic_keys(recipe.training)
    training = {key: PLACEHOLDERS[key] if key in asked else value for key, value in recipe.training.items()}
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
    """The chosen values by key; None removes a key."""
    asked = automatic_keys(recipe.training)
    if MICRO_BATCH in asked and recipe.training.get("steps_per_generation") is not None:
        raise RecipeError(
            f"`training.{MICRO_BATCH}: auto`: with `steps_per_generation` it decides how many completions are sampled"
            " at once. Write a number, or `generation_batch_size` in place of `steps_per_generation`."
        )
    filled, on_cpu = with_placeholders(recipe), runs_on_cpu(recipe, target)
    given = deepspeed or recipe.training.get("deepspeed")
    profile = read_profile(given) if given else None
    shape = config if config is not None else load_config(recipe.model)
    attention = "sdpa" if on_cpu and recipe.model.attention == "auto" else attention_on_gpu(filled, shape)
    setup = setup_of(filled, processes, profile, attention=attention, on_cpu=on_cpu, nodes=nodes)
    readers = groups_of_rows(recipe.training, processes)
    rows = max(1, (recipe.budget.global_batch_tokens or 0) // (recipe.data.sequence_length * readers))
    machine = target or this_machine(processes, on_cpu=on_cpu)

    def count(of: Setup) -> tuple[ModelFacts, Counted]:
        return facts_for(shape, of), count_activations(shape, of)

    try:
        return chosen_values(recipe.training, setup, machine, count, rows=rows, share=share)
    except Exception as problem:  # of a model's own code
        raise RecipeError(
            f"`training.{asked[0]}: auto`: how much memory the model takes could not be planned"
            f" ({type(problem).__name__}: {problem}). Write a number; `cpt rehearse` tries it."
        ) from problem


def nodes_here() -> int:
    """Machines of this run; 1 if they have different numbers of processes."""
    return num_nodes() if world_size() % num_nodes() == 0 else 1


def this_machine(processes: int, *, on_cpu: bool, gpus: list[Gpu] | None = None) -> Target:
    """Its smallest GPU, or a process' share of its memory."""
    memory = host_memory_gib()
    gpus = [] if on_cpu else find_gpus() if gpus is None else gpus
    if not gpus:
        return Target("CPU", 0, memory / processes, 1.0, memory, "this machine")
    smallest = min(gpus, key=lambda gpu: gpu.memory_gib)
    return Target(smallest.name, processes, smallest.memory_gib, peak_of(smallest.name), memory, "this machine")


def chosen_values(
    training: Mapping[str, Any],
    setup: Setup,
    target: Target,
    count: Callable[[Setup], tuple[ModelFacts, Counted]],
    *,
    rows: int,
    share: float = 1.0,
) -> dict[str, Any]:
    """A value for each key that says `auto`; the smallest if nothing fits, since plans are estimates.

    Args:
        setup: the recipe's, with placeholders for what is chosen.
        rows: of a step, on each process; micro-batches divide it.
        share: of a GPU's memory that the run may have.
    """
    asked = automatic_keys(training)
    values: dict[str, Any] = dict.fromkeys(key for key in LOADING if key in asked)
    if LOADING[0] in asked:
        values[LOADING[0]] = 0  # the loader's threads follow the measured wait
    switches = [key for key in CHECKPOINTING if key in asked]
    if MICRO_BATCH in asked or switches:
        most = max(1, BUSY_TOKENS // (setup.beside.sequences * setup.length))
        sizes = [size for size in range(1, min(rows, most) + 1) if rows % size == 0]
        best = fastest_that_fits(
            setup,
            target,
            count(setup),
            micro_batches=sizes if MICRO_BATCH in asked else [setup.micro_batch],
            checkpointing=[False, True] if switches else [setup.checkpointing],
            share=share,
        )
        values |= {MICRO_BATCH: best.micro_batch} if MICRO_BATCH in asked else {}
        values |= dict.fromkeys(switches, best.checkpointing)
    if training.get(ACCUMULATION) == AUTO:
        values[ACCUMULATION] = None  # it follows from the global batch
    return values


def fastest_that_fits(
    setup: Setup,
    target: Target,
    counted: tuple[ModelFacts, Counted],
    *,
    micro_batches: list[int],
    checkpointing: list[bool],
    share: float,
) -> Setup:
    """The least time for a token, where fewer tokens at once keep a GPU less busy."""
    facts, activations = counted
    found = []
    for rows, again in product(micro_batches, checkpointing):
        candidate = replace(setup, micro_batch=rows, checkpointing=again)
        if setup.sampled:  # a step's completions are sampled together, whatever the micro-batch
            candidate = replace(candidate, accumulation=max(1, setup.micro_batch * setup.accumulation // rows))
        if fits(plan_memory(facts, candidate, activations), target, share * CAREFUL):
            idle = HALVED ** math.log2(BUSY_TOKENS / min(BUSY_TOKENS, candidate.tokens_at_once))
            # The start of a run knows no links, and has to choose what `cpt plan` showed.
            speed = planned_speed(facts, candidate, replace(target, gpu_link=0.0), assumed_mfu(candidate))
            found.append((speed.tokens_per_second / idle, -rows, candidate))
    if not found:
        return replace(setup, micro_batch=min(micro_batches), checkpointing=any(checkpointing))
    return max(found, key=lambda one: one[:2])[2]
