"""What `auto` under `training:` means on a machine: the fastest micro-batch and checkpointing that fit by plan."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
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
from cpt.planning.activations import Counted, count_activations
from cpt.planning.advice import CAREFUL, HALVED, fits
from cpt.planning.compiling import compiles
from cpt.planning.facts import ModelFacts
from cpt.planning.memory import facts_for, plan_memory
from cpt.planning.setup import Setup, attention_on_gpu, setup_of
from cpt.planning.speed import assumed_mfu, planned_speed
from cpt.planning.target import Target, peak_of
from cpt.ranks import main_process_decides, num_nodes, tell, world_size
from cpt.recipe.keys import ACCUMULATION, AUTO, CHECKPOINTING, COMPILING, LOADING, MICRO_BATCH, automatic_keys
from cpt.recipe.schema import Recipe
from cpt.training.deepspeed_profile import Profile, read_profile, zero_section

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
    choice = Choice(
        recipe,
        deepspeed,
        config,
        target,
        processes or world_size(),
        nodes or nodes_here(),
        share,
        runs_on_cpu(recipe, target),
    )
    where = "here" if target is None else "there"
    if recipe.training.get(COMPILING, AUTO) == AUTO and (COMPILING in recipe.training or not choice.on_cpu):
        is_on, reason = main_process_decides(choice.compiling)
        if not choice.on_cpu:
            tell(f"training.{COMPILING}: auto is {str(is_on).lower()} {where}: {reason}.")
        recipe = recipe.model_copy(update={"training": {**recipe.training, COMPILING: is_on}})
    asked = automatic_keys(recipe.training)
    if not asked:
        return recipe
    values = main_process_decides(replace(choice, recipe=recipe).values)
    for key in asked:
        value = "decided by the others" if values[key] is None else values[key]
        tell(f"training.{key}: auto is {value} {where}.")
    training = {key: values.get(key, value) for key, value in recipe.training.items()}
    left = {key: value for key, value in training.items() if key not in values or value is not None}
    return recipe.model_copy(update={"training": left})


def runs_on_cpu(recipe: Recipe, target: Target | None) -> bool:
    if target is not None:
        return target.on_cpu
    return bool(recipe.training.get("use_cpu")) or not torch.cuda.is_available()


@dataclass(frozen=True)
class Choice:
    """The arguments of `with_chosen_values`, and the values that follow from them."""

    recipe: Recipe
    deepspeed: str | Profile | None
    config: PreTrainedConfig | None
    target: Target | None
    processes: int
    nodes: int
    share: float
    on_cpu: bool

    @cached_property
    def profile(self) -> Profile | None:
        given = self.deepspeed or self.recipe.training.get("deepspeed")
        return read_profile(given) if given else None

    @cached_property
    def shape(self) -> PreTrainedConfig:
        return self.config if self.config is not None else load_config(self.recipe.model)

    def compiling(self) -> tuple[bool, str]:
        """Whether layers are compiled on that machine, and the reason."""
        zero3, model = self.profile is not None and zero_section(self.profile).get("stage") == 3, None
        if not self.on_cpu:
            with suppress(Exception):  # of a model's own code; the gate reports it
                model = build_on_meta(self.shape)
        is_on, reason = compiles(self.recipe, zero3=zero3, on_cpu=self.on_cpu, model=model)
        if not is_on or self.target is not None:
            return is_on, reason
        if self.processes == 1 and torch.cuda.device_count() > 1:
            return False, "without a launcher torch's DataParallel copies the model to each GPU"
        try:
            check_compiling({COMPILING: True}, zero3=zero3, has_gpu=True)
        except ResourceError as missing:
            return False, str(missing).removesuffix(".")
        return True, reason

    def values(self) -> Mapping[str, Any]:
        """A value for each key that says `auto`, None to remove it; the smallest if nothing fits, since plans are
        estimates."""
        recipe, training, on_cpu = self.recipe, self.recipe.training, self.on_cpu
        asked = automatic_keys(training)
        if MICRO_BATCH in asked and training.get("steps_per_generation") is not None:
            raise RecipeError(
                f"`training.{MICRO_BATCH}: auto`: with `steps_per_generation` it decides how many completions are"
                " sampled at the same time. Write a number, or `generation_batch_size` in place of"
                " `steps_per_generation`."
            )
        values: dict[str, Any] = dict.fromkeys(asked)  # accumulation follows from the global batch
        if LOADING[0] in asked:
            values[LOADING[0]] = 0  # the loader's threads follow the measured wait
        switches = [key for key in CHECKPOINTING if key in asked]
        if MICRO_BATCH not in asked and not switches:
            return values
        filled = with_placeholders(recipe)
        attention = "sdpa" if on_cpu and recipe.model.attention == "auto" else attention_on_gpu(filled, self.shape)
        setup = setup_of(filled, self.processes, self.profile, attention=attention, on_cpu=on_cpu, nodes=self.nodes)
        readers = groups_of_rows(training, self.processes)
        rows = max(1, (recipe.budget.global_batch_tokens or 0) // (recipe.data.sequence_length * readers))
        most = max(1, BUSY_TOKENS // (setup.beside.sequences * setup.length))
        sizes = [size for size in range(1, min(rows, most) + 1) if rows % size == 0]
        try:
            best = fastest_that_fits(
                setup,
                self.target or this_machine(self.processes, on_cpu=on_cpu),
                (facts_for(self.shape, setup), count_activations(self.shape, setup)),
                micro_batches=sizes if MICRO_BATCH in asked else [setup.micro_batch],
                checkpointing=[False, True] if switches else [setup.checkpointing],
                share=self.share,
            )
        except Exception as problem:  # of a model's own code
            raise RecipeError(
                f"`training.{asked[0]}: auto`: how much memory the model takes could not be planned"
                f" ({type(problem).__name__}: {problem}). Write a number; `cpt rehearse` tries it."
            ) from problem
        return (
            values
            | ({MICRO_BATCH: best.micro_batch} if MICRO_BATCH in asked else {})
            | dict.fromkeys(switches, best.checkpointing)
        )


def with_placeholders(recipe: Recipe) -> Recipe:
    """The recipe with any numbers in place of `auto`, for checks of its other keys."""
    asked = automatic_keys(recipe.training)
    training = {key: PLACEHOLDERS[key] if key in asked else value for key, value in recipe.training.items()}
    return recipe.model_copy(update={"training": training})


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
            # The start of a run does not know the links, and must choose as `cpt plan` did.
            speed = planned_speed(facts, candidate, replace(target, gpu_link=0.0), assumed_mfu(candidate))
            found.append((speed.tokens_per_second / idle, -rows, candidate))
    if not found:
        return replace(setup, micro_batch=min(micro_batches), checkpointing=any(checkpointing))
    return max(found, key=lambda one: one[:2])[2]
