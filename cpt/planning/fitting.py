"""Find settings that fit a machine: values for `auto`, and changes to a recipe that does not fit."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
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
from cpt.planning.activations import ActivationCounts
from cpt.planning.memory import MemoryPlan, count_model, plan_memory
from cpt.planning.memory_parts import IN_8_BIT, trains_half
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
ACCUMULATION_KEY, COMPILING_KEY = f"training.{ACCUMULATION}", f"training.{COMPILING}"
SYNCS = "training.accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
PROFILES = REPOSITORY / "deepspeed_configs"
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
    number, machines = processes or world_size(), nodes or nodes_here()
    engine = deepspeed or recipe.training.get("deepspeed")
    if target is None:
        on_cpu, where = (
            bool(recipe.training.get("use_cpu")) or not torch.cuda.is_available(),
            "here",
        )
    else:
        on_cpu, where = target.on_cpu, "there"
    if recipe.training.get(COMPILING, AUTO) == AUTO and (
        COMPILING in recipe.training or not on_cpu
    ):
        is_on, reason = main_process_decides(
            lambda: choose_compiling(
                recipe, engine, config, target=target, processes=number, on_cpu=on_cpu
            )
        )
        if not on_cpu and reason:
            print_once(f"training.{COMPILING}: auto is {str(is_on).lower()} {where}: {reason}.")
        recipe = recipe.model_copy(update={"training": {**recipe.training, COMPILING: is_on}})
    if target is None and not on_cpu and recipe.model.dtype == "auto" and triton_failure():
        with_kernels = automatic_dtype(recipe, deepspeed=bool(engine), on_gpu=True)
        if with_kernels != automatic_dtype(recipe, deepspeed=bool(engine), on_gpu=False):
            report_fallback("model.dtype", "float32", triton_failure())
    asked = automatic_keys(recipe.training)
    if not asked:
        return recipe
    values: dict[str, Any] = dict.fromkeys(
        asked
    )  # None removes a key: accumulation follows from the global batch
    if LOADING[0] in asked:
        values[LOADING[0]] = 0  # the measured wait decides the number of loader threads
    if any(key in asked for key in (MICRO_BATCH, *CHECKPOINTING)):

        def choose() -> Setup:
            shape, machine = (
                config or load_config(recipe.model),
                target or this_machine(number, on_cpu=on_cpu),
            )
            return choose_batch(recipe, engine, shape, machine, number, nodes=machines)[0]

        best = main_process_decides(choose)
        chosen = {MICRO_BATCH: best.micro_batch, **dict.fromkeys(CHECKPOINTING, best.checkpointing)}
        values |= {key: value for key, value in chosen.items() if key in asked}
    for key in asked:
        print_once(
            f"training.{key}: auto is {'set by the other keys' if values[key] is None else values[key]} {where}."
        )
    training = {key: values.get(key, value) for key, value in recipe.training.items()}
    left = {key: value for key, value in training.items() if key not in values or value is not None}
    return recipe.model_copy(update={"training": left})


def choose_compiling(
    recipe: Recipe,
    deepspeed: str | Profile | None,
    config: PreTrainedConfig | None,
    *,
    target: Target | None,
    processes: int,
    on_cpu: bool,
) -> tuple[bool, str]:
    zero3, model = False, None
    if deepspeed:
        zero3 = zero_section(read_profile(deepspeed)).get("stage") == 3
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
    filled, asked, on_cpu = (
        with_placeholders(recipe),
        automatic_keys(recipe.training),
        target.on_cpu,
    )
    share = target.usable_share(recipe.safety.max_gpu_memory)
    if MICRO_BATCH in asked and recipe.training.get("steps_per_generation") is not None:
        raise RecipeError(
            f"`training.{MICRO_BATCH}: auto`: with `steps_per_generation` it sets how many completions are sampled"
            " at the same time. Write a number, or `generation_batch_size` instead of `steps_per_generation`."
        )
    attention = (
        "sdpa" if on_cpu and recipe.model.attention == "auto" else attention_on_gpu(filled, config)
    )
    profile = read_profile(deepspeed) if deepspeed else None
    setup = read_setup(filled, processes, profile, attention=attention, on_cpu=on_cpu, nodes=nodes)
    readers = groups_of_rows(recipe.training, processes)
    rows = max(
        1, (recipe.budget.global_batch_tokens or 0) // (recipe.data.sequence_length * readers)
    )
    most = max(1, BUSY_TOKENS // (setup.needs.sequences * setup.length))
    sizes = [size for size in range(1, min(rows, most) + 1) if rows % size == 0]
    sizes = sizes if MICRO_BATCH in asked else [setup.micro_batch]
    switches = (
        [False, True] if any(key in asked for key in CHECKPOINTING) else [setup.checkpointing]
    )
    found: list[tuple[float, int, Setup]] = []
    try:
        facts, activations = count_model(config, setup)
        for size, again in product(sizes, switches):
            candidate = replace(setup, micro_batch=size, checkpointing=again)
            if setup.sampled:  # a step's completions are sampled together, for any micro-batch
                candidate = replace(
                    candidate, accumulation=max(1, setup.micro_batch * setup.accumulation // size)
                )
            if fits(plan_memory(facts, candidate, activations), target, share * CAREFUL):
                idle = HALVED ** math.log2(BUSY_TOKENS / min(BUSY_TOKENS, candidate.tokens_at_once))
                # The start of a run does not know link speeds, and must choose as `cpt plan` did.
                speed = planned_speed(
                    facts, candidate, replace(target, gpu_link=0.0), assumed_mfu(candidate)
                )
                found.append((speed.tokens_per_second / idle, -size, candidate))
    except Exception as problem:  # errors in custom model code
        raise RecipeError(
            f"`training.{asked[0]}: auto`: the model's memory could not be planned"
            f" ({type(problem).__name__}: {problem}). Write a number; `cpt rehearse` tests it."
        ) from problem
    smallest = replace(setup, micro_batch=min(sizes), checkpointing=any(switches))
    best = max(found, key=lambda one: one[:2])[2] if found else smallest
    return best, (facts, activations)


def with_placeholders(recipe: Recipe) -> Recipe:
    """Return the recipe with arbitrary numbers instead of `auto`, to check its other keys."""
    asked = automatic_keys(recipe.training)
    training = {
        key: PLACEHOLDERS[key] if key in asked else value for key, value in recipe.training.items()
    }
    return recipe.model_copy(update={"training": training})


def nodes_here() -> int:
    """Return the number of machines of this run; 1 if their numbers of processes differ."""
    return num_nodes() if world_size() % num_nodes() == 0 else 1


def this_machine(processes: int, *, on_cpu: bool, gpus: list[Gpu] | None = None) -> Target:
    """Return this machine's smallest GPU, or a process' share of its memory."""
    memory = host_memory_gib()
    gpus = [] if on_cpu else find_gpus() if gpus is None else gpus
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
    slower: float
    """Time relative to the unchanged recipe's, if that fitted."""
    others: tuple["FittingPlan", ...] = ()
    """Alternative changes that fit, cheapest first."""


def fits(plan: MemoryPlan, target: Target, share: float = 1.0) -> bool:
    """Whether the plan fits the GPU, and the host if its memory is known."""
    usable = share * (USABLE_OF_HOST if target.on_cpu else USABLE) * target.memory_gib * GIB
    return plan.peak.size <= usable and (not target.host_is_known or host_room(plan, target) >= 0)


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
        is_allowed: whether the recipe with these changes has no mistakes.
    """
    known: dict[tuple[Any, ...], Counts] = {}

    def counted(candidate: Setup) -> Counts:
        lora = tuple((candidate.lora or {}).items())
        what = (
            candidate.as_computed.weights_bytes,
            candidate.compiles,
            candidate.zero is None,
            lora,
        )
        if what not in known:
            known[what] = count(candidate)
        return known[what]

    own_seconds = (
        setup.tokens_per_step
        / planned_speed(counted(setup)[0], setup, target, mfu).tokens_per_second
    )

    def evaluated(candidate: Setup, changes: Changes) -> tuple[float, FittingPlan] | None:
        facts, activations = counted(candidate)
        plan = plan_memory(facts, candidate, activations)
        if not fits(plan, target, share * (CAREFUL if changes else 1)):
            return None
        reached = mfu * assumed_mfu(candidate) / assumed_mfu(setup)
        seconds = (
            setup.tokens_per_step
            / planned_speed(facts, candidate, target, reached).tokens_per_second
        )
        halvings = math.log2(max(1, setup.micro_batch / candidate.micro_batch))
        number = len(
            changes.keys() - {ACCUMULATION_KEY, COMPILING_KEY, SYNCS}
        )  # these follow from other changes
        unsure = UNKNOWN_HOST if not target.host_is_known and candidate.updates_on_host else 1
        cost = seconds * CHANGE**number * HALVED**halvings * unsure
        return cost, FittingPlan(candidate, plan, changes, seconds / own_seconds)

    found: list[FittingPlan] = []
    for kinds in ([with_all_parameters], [with_small_states, with_adapters]):
        best: list[tuple[float, FittingPlan]] = []
        for kind in kinds:
            fitting = [one for pair in kind(setup, target) if (one := evaluated(*pair)) is not None]
            fitting.sort(key=lambda pair: pair[0])
            cheapest = next((pair for pair in fitting if is_allowed(pair[1].changes)), None)
            best += [] if cheapest is None else [cheapest]
        found += [one for _, one in sorted(best, key=lambda pair: pair[0])]
        if found and (target.host_is_known or host_room(found[0].plan, target) >= 0):
            break
    return replace(found[0], others=tuple(found[1:])) if found else None


def with_all_parameters(setup: Setup, target: Target) -> Iterator[tuple[Setup, Changes]]:
    """Yield all combinations of micro-batch, checkpointing, fused loss and engine; adapters are kept."""
    engines: list[tuple[Changes, Sharding | None]] = [({}, setup.zero)]
    for path, shipped in shipped_profiles() if not target.on_cpu else ():
        if shipped != setup.zero and (setup.gpus > 1 or shipped.offload_optimizer):
            engines.append(({"training.deepspeed": path}, shipped))
    is_divided, is_own_loss = (
        setup.zero is not None and setup.zero.is_fsdp,
        setup.needs.stage not in KINDS,
    )
    is_plain = (
        setup.optimizer == "adamw"
        and setup.rounding is None
        and setup.lora is None
        and not setup.releases
    )
    # same check as in `cpt.training.engine_profiles`
    if (
        setup.gpus > 1
        and not target.on_cpu
        and not is_divided
        and is_own_loss
        and is_plain
        and not setup.scales_loss
    ):
        engines.append(({"training.fsdp": True, SYNCS: True}, FSDP2))
    micro_batches = [setup.micro_batch]
    while micro_batches[-1] % 2 == 0:
        micro_batches.append(micro_batches[-1] // 2)
    fused = (
        (setup.fused_loss,)
        if target.on_cpu or setup.needs.logits != WHOLE
        else (setup.fused_loss, True)
    )
    choices = product(micro_batches, (setup.checkpointing, True), fused, engines)
    for micro_batch, checkpointing, fused_loss, (engine, zero) in choices:
        recomputes_hooks = checkpointing and CHECKPOINTS_AROUND_CALLS
        breaks_graphs = (
            zero is not None and zero.stage == 3 and (recomputes_hooks or not zero.is_fsdp)
        )
        compiles = setup.compiles and not breaks_graphs
        changed = replace(
            setup, checkpointing=checkpointing, fused_loss=fused_loss, zero=zero, compiles=compiles
        )
        changes: Changes = (
            {"training.gradient_checkpointing": True}
            if checkpointing != setup.checkpointing
            else {}
        )
        changes |= {"model.fused_loss": fused_loss} if fused_loss != setup.fused_loss else {}
        changes |= engine | ({COMPILING_KEY: False} if compiles != setup.compiles else {})
        if engine:
            is_cast = zero is FSDP2
            changed = replace(changed, half=True, weights_bytes=4 if is_cast else 2)
            changes = without_engine(setup) | changes
            if not setup.half:
                changes["training.bf16"] = True
            if is_cast and trains_half(setup):
                changes["model.dtype"] = "auto"  # fp32 parts, which compute in bfloat16
        if micro_batch != setup.micro_batch:  # the same rows per step, in smaller micro-batches
            needs, accumulation = (
                changed.needs,
                setup.accumulation * setup.micro_batch // micro_batch,
            )
            changes["training.per_device_train_batch_size"] = micro_batch
            if not setup.batch_is_given:
                changes[ACCUMULATION_KEY] = accumulation
            if (
                needs.steps_per_generation is not None
            ):  # to sample the same number of completions at once
                steps = needs.steps_per_generation * setup.micro_batch // micro_batch
                changes["training.steps_per_generation"] = steps
                needs = replace(needs, steps_per_generation=steps)
            changed = replace(
                changed, micro_batch=micro_batch, accumulation=accumulation, needs=needs
            )
        yield changed, changes


def with_small_states(setup: Setup, target: Target) -> Iterator[tuple[Setup, Changes]]:
    """Yield plans with all parameters in bfloat16, 8-bit states, and no fp32 copy; on one GPU, released gradients."""
    if (
        setup.lora is not None
        or target.on_cpu
        or setup.scales_loss
        or setup.optimizer not in ("adamw", *IN_8_BIT)
    ):
        return
    small = replace(setup, weights_bytes=2, zero=None, half=True)
    is_written = (
        trains_half(setup) and setup.optimizer in IN_8_BIT
    )  # with adamw, `auto` may be bfloat16
    first: Changes = {} if is_written else {"model.dtype": "bfloat16"}
    last = without_engine(setup) | ({} if setup.half else {"training.bf16": True})
    for optimizer, (candidate, changes) in product(IN_8_BIT, with_all_parameters(small, target)):
        changed = replace(candidate, optimizer=optimizer)
        if changed.zero is not None:
            continue
        name = {} if optimizer == setup.optimizer else {"optimizer.name": optimizer}
        yield changed, first | name | changes | last
        if setup.gpus == 1 and setup.needs.stage not in KINDS and not setup.releases:
            is_one_portion = changed.accumulation == 1 and ACCUMULATION_KEY not in changes
            tokens = {"budget.global_batch_tokens": changed.micro_batch * changed.sequence_length}
            step = (
                {}
                if is_one_portion
                else tokens
                if changed.batch_is_given
                else {ACCUMULATION_KEY: 1}
            )
            released = (
                {"optimizer.release_gradients": True}
                | changes
                | step
                | {"training.max_grad_norm": 0}
            )
            yield replace(changed, releases=True, accumulation=1), first | name | released | last


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
    for candidate, changes in with_all_parameters(lora, target):
        if candidate.zero is None:
            bf16 = {"training.bf16": True} if half and not setup.half else {}
            yield candidate, {"model.lora": {"r": 16}} | without_engine(setup) | bf16 | changes


def shipped_profiles() -> list[tuple[str, Sharding]]:
    files = {
        f"{PROFILES.name}/{file.name}": json.loads(file.read_text())
        for file in sorted(PROFILES.glob("*.json"))
    }
    read = [(name, read_deepspeed_sharding(profile)) for name, profile in files.items()]
    return [(name, zero) for name, zero in read if zero is not None]
