"""Find settings that fit a machine: values for `auto`, and changes to a recipe that does not fit."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedConfig

from cpt.distributed import (
    groups_of_rows,
    main_process_decides,
    num_nodes,
    print_once,
    report_fallback,
    world_size,
)
from cpt.errors import RecipeError, ResourceError
from cpt.hardware import GIB, Gpu, find_gpus, host_memory_gib, known_gpu, triton_failure
from cpt.models.config import load_config
from cpt.models.inventory import build_on_meta
from cpt.models.layers import CHECKPOINTS_AROUND_CALLS, check_compiling
from cpt.optim.adamw import automatic_dtype
from cpt.optim.build import facts_of
from cpt.planning.activations import ActivationCounts
from cpt.planning.memory import MemoryPlan, count_model, plan_memory
from cpt.planning.memory_parts import trains_half
from cpt.planning.model_sizes import KINDS, WHOLE, ModelSizes
from cpt.planning.speed import Target, assumed_mfu, planned_speed
from cpt.planning.workload import (
    Setup,
    Sharding,
    attention_on_gpu,
    compiles,
    read_deepspeed_sharding,
    read_setup,
)
from cpt.recipe.keys import (
    ACCUMULATION,
    AUTO,
    CHECKPOINTING,
    COMPILING,
    LOADING,
    MICRO_BATCH,
    automatic_keys,
)
from cpt.recipe.load import REPOSITORY
from cpt.recipe.schema import Recipe
from cpt.training.engine_profiles import Profile, read_profile, zero_section

BUSY_TOKENS = 32_768  # per micro-batch: more do not increase utilization
PLACEHOLDERS = {
    MICRO_BATCH: 1,
    ACCUMULATION: 1,
    **dict.fromkeys(CHECKPOINTING, False),
    **dict.fromkeys(LOADING, 0),
    COMPILING: False,
}
USUAL_TFLOPS = 150.0  # for a GPU that is not in the table
USABLE = 0.98  # of the memory on a GPU's data sheet: the rest is reserved
USABLE_OF_HOST = 0.92  # the system and other programs use the rest
CAREFUL = 0.95  # of a run's available memory, for proposals
CHANGE = 1.03  # a plan with one change fewer may be this much slower
UNKNOWN_HOST = 1.1  # a plan without offloading to a host of unknown memory may be this much slower
HALVED = 1.05  # slowdown for half the micro-batch; a guess
ACCUMULATION_KEY = f"training.{ACCUMULATION}"
MICRO_BATCH_KEY = f"training.{MICRO_BATCH}"
COMPILING_KEY = f"training.{COMPILING}"
SYNCS = "training.accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
PROFILES = REPOSITORY / "deepspeed_configs"
SMALL_STATES = ("adamw_8bit", "paged_adamw_8bit")
FSDP2 = Sharding(3, is_fsdp=True, reduces_each_micro_batch=True)
Changes = dict[str, Any]
"""Keys of the recipe, with dots, and their values."""
Counts = tuple[ModelSizes, ActivationCounts]


def with_chosen_values(
    recipe: Recipe,
    *,
    deepspeed: str | Profile | None = None,
    config: PreTrainedConfig | None = None,
    target: Target | None = None,
    processes: int | None = None,
    nodes: int | None = None,
) -> Recipe:
    """Return the recipe with values in place of `auto`, and print each of them.

    By default the model's config is loaded, and the plan is for this machine and the processes and nodes of this run.

    Args:
        deepspeed: the active profile, if it is not the recipe's.

    Raises:
        RecipeError: the model's memory cannot be planned.
        ResourceError: the model's config cannot be read.
    """
    processes = processes or world_size()
    nodes = nodes or nodes_here()
    engine = deepspeed or recipe.training.get("deepspeed")
    on_cpu = bool(recipe.training.get("use_cpu")) or not torch.cuda.is_available()
    if target is not None:
        on_cpu = target.on_cpu
    recipe = with_compiling(
        recipe, engine, config, target=target, processes=processes, on_cpu=on_cpu
    )
    if target is None and not on_cpu and recipe.model.dtype == "auto" and triton_failure():
        with_kernels = automatic_dtype(recipe, deepspeed=bool(engine), on_gpu=True)
        if with_kernels != automatic_dtype(recipe, deepspeed=bool(engine), on_gpu=False):
            report_fallback("model.dtype", "float32", triton_failure())

    automatic = automatic_keys(recipe.training)
    if not automatic:
        return recipe
    values: dict[str, Any] = {}
    if LOADING[0] in automatic:
        values[LOADING[0]] = 0  # the measured wait decides the number of loader threads
    if any(key in automatic for key in (MICRO_BATCH, *CHECKPOINTING)):

        def choose() -> Setup:
            shape = config or load_config(recipe.model)
            machine = target or this_machine(processes, on_cpu=on_cpu)
            setup, _ = choose_batch(recipe, engine, shape, machine, processes, nodes=nodes)
            return setup

        setup = main_process_decides(choose)
        values[MICRO_BATCH] = setup.micro_batch
        values |= dict.fromkeys(CHECKPOINTING, setup.checkpointing)

    training = dict(recipe.training)
    for key in automatic:
        if key in values:
            training[key] = values[key]
        else:
            del training[key]  # such as accumulation, which follows from the global batch
        print_once(
            f"training.{key}: auto is {values.get(key, 'set by the other keys')} {here_or_there(target)}."
        )
    return recipe.model_copy(update={"training": training})


def here_or_there(target: Target | None) -> str:
    return "here" if target is None else "there"


def with_compiling(
    recipe: Recipe,
    deepspeed: str | Profile | None,
    config: PreTrainedConfig | None,
    *,
    target: Target | None,
    processes: int,
    on_cpu: bool,
) -> Recipe:
    """Return the recipe with a value for `torch_compile`, if that is `auto`; on a GPU it is by default."""
    default = False if on_cpu else AUTO
    if recipe.training.get(COMPILING, default) != AUTO:
        return recipe
    is_on, reason = main_process_decides(
        lambda: choose_compiling(
            recipe, deepspeed, config, target=target, processes=processes, on_cpu=on_cpu
        )
    )
    if not on_cpu and reason:
        print_once(
            f"training.{COMPILING}: auto is {str(is_on).lower()} {here_or_there(target)}: {reason}."
        )
    return recipe.model_copy(update={"training": {**recipe.training, COMPILING: is_on}})


def choose_compiling(
    recipe: Recipe,
    deepspeed: str | Profile | None,
    config: PreTrainedConfig | None,
    *,
    target: Target | None,
    processes: int,
    on_cpu: bool,
) -> tuple[bool, str]:
    zero3 = False
    if deepspeed:
        zero3 = zero_section(read_profile(deepspeed)).get("stage") == 3
    model = None
    if not on_cpu:
        with suppress(Exception):  # errors in custom model code; the gate reports them
            model = build_on_meta(config or load_config(recipe.model))
    capability = capability_of(target)
    is_on, reason = compiles(recipe, zero3=zero3, on_cpu=on_cpu, model=model, capability=capability)
    if not is_on or target is not None:
        return is_on, reason
    if processes == 1 and torch.cuda.device_count() > 1:
        return False, "without a launcher torch's DataParallel copies the model to each GPU"
    try:
        check_compiling({COMPILING: True}, zero3=zero3)
    except ResourceError as missing:
        report_fallback(COMPILING_KEY, False, triton_failure() or str(missing).removesuffix("."))
        return False, ""
    return True, reason


def capability_of(target: Target | None) -> str | None:
    """Return the compute capability of the target's GPU, or of this machine's first; None if it is unknown."""
    if target is None:
        return next((gpu.compute_capability for gpu in find_gpus()), None)
    kind = known_gpu(target.name)
    return None if kind is None else kind.compute_capability


def choose_batch(
    recipe: Recipe,
    deepspeed: str | Profile | None,
    config: PreTrainedConfig,
    target: Target,
    processes: int,
    *,
    nodes: int = 1,
) -> tuple[Setup, Counts]:
    """Choose the fastest micro-batch and checkpointing that fit, else the smallest; also return model sizes."""
    automatic = automatic_keys(recipe.training)
    if MICRO_BATCH in automatic and recipe.training.get("steps_per_generation") is not None:
        raise RecipeError(
            f"`training.{MICRO_BATCH}: auto`: with `steps_per_generation` it sets how many completions are sampled"
            " at the same time. Write a number, or `generation_batch_size` instead of `steps_per_generation`."
        )

    setup = setup_without_auto(recipe, deepspeed, config, target, processes, nodes=nodes)
    micro_batches = [setup.micro_batch]
    if MICRO_BATCH in automatic:
        micro_batches = divisors_of_batch(recipe, setup, processes)
    switches = [setup.checkpointing]
    if any(key in automatic for key in CHECKPOINTING):
        switches = [False, True]

    share = CAREFUL * target.usable_share(recipe.safety.max_gpu_memory)
    # The start of a run does not know link speeds, and must choose as `cpt plan` did.
    target_without_links = replace(target, gpu_link=0.0)
    best_speed = 0.0
    best = replace(setup, micro_batch=min(micro_batches), checkpointing=any(switches))
    try:
        sizes, activations = count_model(config, setup)
        for micro_batch, checkpointing in product(micro_batches, switches):
            candidate = replace(setup, micro_batch=micro_batch, checkpointing=checkpointing)
            if setup.sampled:  # a step's completions are sampled together, for any micro-batch
                rows = setup.micro_batch * setup.accumulation
                candidate = replace(candidate, accumulation=max(1, rows // micro_batch))
            if not fits(plan_memory(sizes, candidate, activations), target, share):
                continue
            mfu = assumed_mfu(candidate)
            speed = planned_speed(sizes, candidate, target_without_links, mfu).tokens_per_second
            speed /= HALVED ** math.log2(BUSY_TOKENS / min(BUSY_TOKENS, candidate.tokens_at_once))
            if speed > best_speed:
                best_speed = speed
                best = candidate
    except Exception as problem:  # errors in custom model code
        raise RecipeError(
            f"`training.{automatic[0]}: auto`: the model's memory could not be planned"
            f" ({type(problem).__name__}: {problem}). Write a number; `cpt rehearse` tests it."
        ) from problem
    return best, (sizes, activations)


def setup_without_auto(
    recipe: Recipe,
    deepspeed: str | Profile | None,
    config: PreTrainedConfig,
    target: Target,
    processes: int,
    *,
    nodes: int,
) -> Setup:
    filled = with_placeholders(recipe)
    attention = attention_on_gpu(filled, config)
    if target.on_cpu and recipe.model.attention == "auto":
        attention = "sdpa"
    return read_setup(
        filled,
        processes,
        read_profile(deepspeed) if deepspeed else None,
        attention=attention,
        on_cpu=target.on_cpu,
        nodes=nodes,
    )


def divisors_of_batch(recipe: Recipe, setup: Setup, processes: int) -> list[int]:
    """Micro-batches that divide a process's rows of a step, up to those that keep a GPU busy."""
    readers = groups_of_rows(recipe.training, processes)
    batch_tokens = recipe.budget.global_batch_tokens or 0
    rows = max(1, batch_tokens // (recipe.data.sequence_length * readers))
    busy_rows = max(1, BUSY_TOKENS // (setup.needs.sequences * setup.length))
    return [size for size in range(1, min(rows, busy_rows) + 1) if rows % size == 0]


def with_placeholders(recipe: Recipe) -> Recipe:
    """Return the recipe with arbitrary numbers instead of `auto`, to check its other keys."""
    training = dict(recipe.training)
    for key in automatic_keys(training):
        training[key] = PLACEHOLDERS[key]
    return recipe.model_copy(update={"training": training})


def nodes_here() -> int:
    """Return the number of machines of this run; 1 if their numbers of processes differ."""
    return num_nodes() if world_size() % num_nodes() == 0 else 1


def this_machine(processes: int, *, on_cpu: bool, gpus: list[Gpu] | None = None) -> Target:
    """Return this machine's smallest GPU, or a process' share of its memory."""
    memory = host_memory_gib()
    if on_cpu:
        gpus = []
    elif gpus is None:
        gpus = find_gpus()
    if not gpus:
        return Target("CPU", 0, memory / processes, 1.0, memory, "this machine")
    smallest = min(gpus, key=lambda gpu: gpu.memory_gib)
    kind = known_gpu(smallest.name)
    peak = 1e12 * (kind.peak_tflops if kind is not None else USUAL_TFLOPS)
    return Target(smallest.name, processes, smallest.memory_gib, peak, memory, "this machine")


@dataclass(frozen=True)
class FittingPlan:
    setup: Setup
    plan: MemoryPlan
    changes: Changes
    cost: float
    """Seconds of a step, with penalties."""
    slower: float
    """Time relative to the unchanged recipe's, if that fitted."""
    others: tuple["FittingPlan", ...] = ()
    """Alternative changes that fit, cheapest first."""


def fits(plan: MemoryPlan, target: Target, share: float = 1.0) -> bool:
    """Whether the plan fits the GPU, and the host if its memory is known."""
    usable = share * (USABLE_OF_HOST if target.on_cpu else USABLE)
    has_room = plan.peak.size <= usable * target.memory_gib * GIB
    return has_room and (not target.host_is_known or host_room(plan, target) >= 0)


def host_room(plan: MemoryPlan, target: Target) -> float:
    """Free bytes of a host; negative if memory is missing."""
    return USABLE_OF_HOST * target.host_memory_gib * GIB - plan.host.size


def cheapest_that_fits(
    setup: Setup,
    target: Target,
    count: Callable[[Setup], Counts],
    *,
    mfu: float,
    share: float = 1.0,
    is_allowed: Callable[[Changes], bool] = lambda _: True,
) -> FittingPlan | None:
    """Find the fastest plan for all parameters with the recipe's optimizer; each change counts as 3 % of the time.

    If that does not fit, or only in more host memory than is known, also propose adapters, and bfloat16 weights with
    8-bit states, for the user to choose.

    Args:
        is_allowed: whether the recipe is valid with these changes.
    """
    search = PlanSearch(setup, target, count, mfu, share)
    proposals: list[FittingPlan] = []
    for kinds in ([with_all_parameters], [with_small_states, with_adapters]):
        cheapest: list[FittingPlan] = []
        for kind in kinds:
            for plan in search.plans_by_cost(kind(setup, target)):
                if is_allowed(plan.changes):
                    cheapest.append(plan)
                    break
        proposals += sorted(cheapest, key=lambda plan: plan.cost)
        if proposals and (target.host_is_known or host_room(proposals[0].plan, target) >= 0):
            break
    if not proposals:
        return None
    return replace(proposals[0], others=tuple(proposals[1:]))


@dataclass
class PlanSearch:
    """Plans of changed setups, compared with the recipe's own."""

    setup: Setup
    target: Target
    count: Callable[[Setup], Counts]
    mfu: float
    share: float
    counts: dict[tuple[Any, ...], Counts] = field(default_factory=dict)
    """Counts so far, by what determines them."""

    def plans_by_cost(self, candidates: Iterator[tuple[Setup, Changes]]) -> list[FittingPlan]:
        plans = [self.plan(candidate, changes) for candidate, changes in candidates]
        return sorted((plan for plan in plans if plan is not None), key=lambda plan: plan.cost)

    def plan(self, candidate: Setup, changes: Changes) -> FittingPlan | None:
        """Return the candidate's plan; None if it does not fit."""
        sizes, activations = self.counted(candidate)
        plan = plan_memory(sizes, candidate, activations)
        if not fits(plan, self.target, self.share * (CAREFUL if changes else 1)):
            return None

        mfu = self.mfu * assumed_mfu(candidate) / assumed_mfu(self.setup)
        seconds = self.step_seconds(candidate, mfu)
        own_seconds = self.step_seconds(self.setup, self.mfu)
        # these three keys follow from other changes
        num_changes = len(changes.keys() - {ACCUMULATION_KEY, COMPILING_KEY, SYNCS})
        halvings = math.log2(max(1, self.setup.micro_batch / candidate.micro_batch))
        cost = seconds * CHANGE**num_changes * HALVED**halvings
        if candidate.updates_on_host and not self.target.host_is_known:
            cost *= UNKNOWN_HOST
        return FittingPlan(
            setup=candidate,
            plan=plan,
            changes=changes,
            cost=cost,
            slower=seconds / own_seconds,
        )

    def step_seconds(self, candidate: Setup, mfu: float) -> float:
        """Seconds for the tokens of a step of the recipe."""
        sizes, _ = self.counted(candidate)
        speed = planned_speed(sizes, candidate, self.target, mfu)
        return self.setup.tokens_per_step / speed.tokens_per_second

    def counted(self, candidate: Setup) -> Counts:
        key = (
            candidate.as_computed.weights_bytes,
            candidate.compiles,
            candidate.zero is None,
            *(candidate.lora or {}).items(),
        )
        if key not in self.counts:
            self.counts[key] = self.count(candidate)
        return self.counts[key]


def with_all_parameters(setup: Setup, target: Target) -> Iterator[tuple[Setup, Changes]]:
    """Yield all combinations of micro-batch, checkpointing, fused loss and engine; adapters are kept."""
    micro_batches = [setup.micro_batch]
    while micro_batches[-1] % 2 == 0:
        micro_batches.append(micro_batches[-1] // 2)
    fused = [setup.fused_loss]
    if setup.needs.logits == WHOLE and not target.on_cpu:
        fused.append(True)
    engines = engines_to_try(setup, target)
    choices = product(micro_batches, (setup.checkpointing, True), fused, engines)
    for micro_batch, checkpointing, fused_loss, (engine, zero) in choices:
        compiles = setup.compiles and not breaks_graphs(zero, checkpointing=checkpointing)
        changed = replace(
            setup, checkpointing=checkpointing, fused_loss=fused_loss, zero=zero, compiles=compiles
        )
        changes: Changes = {}
        if checkpointing != setup.checkpointing:
            changes["training.gradient_checkpointing"] = True
        if fused_loss != setup.fused_loss:
            changes["model.fused_loss"] = fused_loss
        changes |= engine
        if compiles != setup.compiles:
            changes[COMPILING_KEY] = False
        if engine:
            is_cast = zero is FSDP2
            changed = replace(changed, half=True, weights_bytes=4 if is_cast else 2)
            changes = without_engine(setup) | changes
            if not setup.half:
                changes["training.bf16"] = True
            if is_cast and trains_half(setup):
                changes["model.dtype"] = "auto"  # fp32 parts, which compute in bfloat16
        if micro_batch != setup.micro_batch:
            changed = in_smaller_batches(changed, micro_batch, changes)
        yield changed, changes


def engines_to_try(setup: Setup, target: Target) -> list[tuple[Changes, Sharding | None]]:
    """The recipe's engine, the shipped profiles of DeepSpeed, and FSDP2."""
    engines: list[tuple[Changes, Sharding | None]] = [({}, setup.zero)]
    if target.on_cpu:
        return engines
    for path, shipped in shipped_profiles():
        if shipped != setup.zero and (setup.gpus > 1 or shipped.offload_optimizer):
            engines.append(({"training.deepspeed": path}, shipped))
    # same check as in `cpt.training.engine_profiles`
    is_supported = (
        setup.optimizer == "adamw"
        and setup.rounding is None
        and setup.lora is None
        and setup.needs.stage not in KINDS
        and not setup.releases
        and not setup.scales_loss
    )
    has_fsdp = setup.zero is not None and setup.zero.is_fsdp
    if setup.gpus > 1 and is_supported and not has_fsdp:
        engines.append(({"training.fsdp": True, SYNCS: True}, FSDP2))
    return engines


def breaks_graphs(zero: Sharding | None, *, checkpointing: bool) -> bool:
    """Whether layers cannot be compiled under this engine."""
    if zero is None or zero.stage < 3:
        return False
    return not zero.is_fsdp or (checkpointing and CHECKPOINTS_AROUND_CALLS)


def in_smaller_batches(setup: Setup, micro_batch: int, changes: Changes) -> Setup:
    """Return the setup with the same rows per step, and add its keys to `changes`."""
    needs = setup.needs
    times = setup.micro_batch // micro_batch
    changes[MICRO_BATCH_KEY] = micro_batch
    if not setup.batch_is_given:
        changes[ACCUMULATION_KEY] = setup.accumulation * times
    if needs.steps_per_generation is not None:  # to sample the same number of completions at once
        needs = replace(needs, steps_per_generation=needs.steps_per_generation * times)
        changes["training.steps_per_generation"] = needs.steps_per_generation
    accumulation = setup.accumulation * times
    return replace(setup, micro_batch=micro_batch, accumulation=accumulation, needs=needs)


def with_small_states(setup: Setup, target: Target) -> Iterator[tuple[Setup, Changes]]:
    """Yield plans with all parameters in bfloat16, 8-bit states, and no fp32 copy; on one GPU, released gradients."""
    if (
        setup.lora is not None
        or target.on_cpu
        or setup.scales_loss
        or not facts_of(setup.optimizer).keeps_master_weights
    ):
        return
    small = replace(setup, weights_bytes=2, zero=None, half=True)
    first: Changes = {}
    if setup.rounding == "kahan":  # of `adamw` alone
        small = replace(small, rounding="stochastic")
        first["optimizer.rounding"] = "stochastic"
    is_quantized = facts_of(setup.optimizer).quantizes_moments
    if not trains_half(setup) or not is_quantized:  # adamw's `auto` may be bfloat16
        first["model.dtype"] = "bfloat16"
    last = without_engine(setup)
    if not setup.half:
        last["training.bf16"] = True
    for optimizer in SMALL_STATES:
        name: Changes = {} if optimizer == setup.optimizer else {"optimizer.name": optimizer}
        for candidate, changes in with_all_parameters(replace(small, optimizer=optimizer), target):
            if candidate.zero is not None:
                continue
            yield candidate, first | name | changes | last
            if setup.gpus == 1 and setup.needs.stage not in KINDS and not setup.releases:
                released = first | name | release_gradients(candidate, changes) | last
                yield replace(candidate, releases=True, accumulation=1), released


def release_gradients(setup: Setup, changes: Changes) -> Changes:
    """Add the keys that make a micro-batch a step."""
    released: Changes = {"optimizer.release_gradients": True} | changes
    if setup.accumulation > 1 or ACCUMULATION_KEY in changes:
        if setup.batch_is_given:
            released["budget.global_batch_tokens"] = setup.micro_batch * setup.sequence_length
        else:
            released[ACCUMULATION_KEY] = 1
    return released | {"training.max_grad_norm": 0}


def without_engine(setup: Setup) -> Changes:
    if setup.zero is None:
        return {}
    if setup.zero.is_fsdp:
        return {"training.fsdp": None, "training.fsdp_config": None}
    return {"training.deepspeed": None}


def with_adapters(setup: Setup, target: Target) -> Iterator[tuple[Setup, Changes]]:
    if setup.lora is not None or setup.from_scratch or setup.train_only is not None:
        return
    half = setup.half or not target.on_cpu
    lora = replace(setup, lora={"r": 16}, zero=None, half=half, weights_bytes=2 if half else 4)
    first: Changes = {"model.lora": {"r": 16}} | without_engine(setup)
    if half and not setup.half:
        first["training.bf16"] = True
    for candidate, changes in with_all_parameters(lora, target):
        if candidate.zero is None:
            yield candidate, first | changes


def shipped_profiles() -> list[tuple[str, Sharding]]:
    profiles: list[tuple[str, Sharding]] = []
    for file in sorted(PROFILES.glob("*.json")):
        zero = read_deepspeed_sharding(json.loads(file.read_text()))
        if zero is not None:
            profiles.append((f"{PROFILES.name}/{file.name}", zero))
    return profiles
