"""What to change so that a run fits: of all changes that fit, the fastest that is nearest to the recipe."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from cpt.planning.activations import Counted
from cpt.planning.facts import ModelFacts
from cpt.planning.memory import MemoryPlan, plan_memory
from cpt.planning.setup import Setup, Zero, zero_of
from cpt.planning.speed import assumed_mfu, planned_speed
from cpt.planning.stage_terms import KINDS, WHOLE
from cpt.planning.target import Target
from cpt.planning.terms import GIB, IN_8_BIT, trains_half
from cpt.recipe.load import REPOSITORY

USABLE = 0.98  # of the memory on a GPU's data sheet: the rest is its own
USABLE_OF_HOST = 0.92  # the system and other programs have the rest
CAREFUL = 0.95  # of what a run can have, for what is proposed
CHANGE = 1.03  # how much slower a plan may be for one change fewer
UNKNOWN_HOST = 1.1  # how much slower a plan may be that does not need host memory nobody has described
HALVED = 1.05  # a micro-batch half as large keeps a GPU less busy; a guess
ACCUMULATION, COMPILING = "training.gradient_accumulation_steps", "training.torch_compile"
SYNCS = "training.accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
PROFILES = REPOSITORY / "deepspeed_configs"
FSDP2 = Zero(3, is_fsdp=True, reduces_each_micro_batch=True)
Changes = dict[str, Any]
"""Keys of the recipe, with dots, and their values."""
Count = Callable[[Setup], tuple[ModelFacts, Counted]]


@dataclass(frozen=True)
class Proposal:
    """A setup that fits."""

    setup: Setup
    plan: MemoryPlan
    changes: Changes = field(default_factory=dict)
    slower: float = 1.0
    """How many times the recipe's own time, if that fitted."""
    others: tuple["Proposal", ...] = ()
    """Other kinds of changes that fit, the next cheapest first."""


def fits(plan: MemoryPlan, target: Target, share: float = 1.0) -> bool:
    """The GPU, and the host if its memory is known."""
    return gpu_room(plan, target, share) >= 0 and (not target.host_is_known or host_room(plan, target) >= 0)


def gpu_room(plan: MemoryPlan, target: Target, share: float = 1.0) -> float:
    """Bytes that stay free at the peak; negative: what is missing."""
    return share * (USABLE_OF_HOST if target.on_cpu else USABLE) * target.memory_gib * GIB - plan.peak.size


def host_room(plan: MemoryPlan, target: Target) -> float:
    """The same of the host."""
    return USABLE_OF_HOST * target.host_memory_gib * GIB - plan.host.size


def host_that_is_needed(plan: MemoryPlan) -> float:
    """GiB of a machine, with what the system needs."""
    return plan.host.size / USABLE_OF_HOST / GIB


def cheapest_that_fits(
    setup: Setup, target: Target, count: Count, *, mfu: float, share: float = 1.0
) -> Proposal | None:
    """All parameters with the recipe's own optimizer, in the least time, where each change counts as 3 % of it.

    If that does not fit, or only in more host memory than is known, adapters and bfloat16 weights with 8-bit states
    are proposed too: the reader knows which will do.
    """
    known: dict[tuple[Any, ...], tuple[ModelFacts, Counted]] = {}

    def counted(candidate: Setup) -> tuple[ModelFacts, Counted]:
        lora = tuple((candidate.lora or {}).items())
        what = (candidate.as_computed.weights_bytes, candidate.compiles, candidate.zero is None, lora)
        if what not in known:
            known[what] = count(candidate)
        return known[what]

    def evaluated(candidate: Setup, changes: Changes) -> tuple[float, Proposal] | None:
        facts, activations = counted(candidate)
        plan = plan_memory(facts, candidate, activations)
        if not fits(plan, target, share * (CAREFUL if changes else 1)):
            return None
        reached = mfu * assumed_mfu(candidate) / assumed_mfu(setup)
        seconds = setup.tokens_per_step / planned_speed(facts, candidate, target, reached).tokens_per_second
        halvings = math.log2(max(1, setup.micro_batch / candidate.micro_batch))
        number = len(changes.keys() - {ACCUMULATION, COMPILING, SYNCS})  # these follow from the others
        needs_host = candidate.zero is not None and candidate.zero.offload_optimizer
        unsure = UNKNOWN_HOST if not target.host_is_known and needs_host else 1
        return seconds * CHANGE**number * HALVED**halvings * unsure, Proposal(candidate, plan, changes, seconds)

    own_facts, _ = counted(setup)
    own_seconds = setup.tokens_per_step / planned_speed(own_facts, setup, target, mfu).tokens_per_second
    found: list[Proposal] = []
    for kinds in (
        (with_all_parameters(setup, target),),
        (with_small_states(setup, target), with_adapters(setup, target)),
    ):
        best: list[tuple[float, Proposal]] = []
        for candidates in kinds:
            fitting = [one for candidate, changes in candidates if (one := evaluated(candidate, changes)) is not None]
            best += [min(fitting, key=lambda pair: pair[0])] if fitting else []
        found += [replace(one, slower=one.slower / own_seconds) for _, one in sorted(best, key=lambda pair: pair[0])]
        if found and (target.host_is_known or host_room(found[0].plan, target) >= 0):
            break
    return replace(found[0], others=tuple(found[1:])) if found else None


def with_all_parameters(setup: Setup, target: Target) -> Iterator[tuple[Setup, Changes]]:
    """Every combination of micro-batch, checkpointing, fused loss and engine; adapters stay."""
    engines: list[tuple[Changes, Zero | None]] = [({}, setup.zero)]
    if not target.on_cpu:
        engines += [
            ({"training.deepspeed": path}, zero)
            for path, zero in shipped_profiles()
            if zero != setup.zero and (setup.gpus > 1 or zero.offload_optimizer)
        ]
    if takes_fsdp(setup, target):
        engines.append(({"training.fsdp": True, SYNCS: True}, FSDP2))
    fused = (setup.fused_loss,) if target.on_cpu or setup.beside.logits != WHOLE else (setup.fused_loss, True)
    for micro_batch, checkpointing, fused_loss, (engine, zero) in product(
        micro_batches(setup), (setup.checkpointing, True), fused, engines
    ):
        breaks_graphs = zero is not None and zero.stage == 3 and (checkpointing or not zero.is_fsdp)
        compiles = setup.compiles and not breaks_graphs
        changed = replace(setup, checkpointing=checkpointing, fused_loss=fused_loss, zero=zero, compiles=compiles)
        changes: Changes = {"training.gradient_checkpointing": True} if checkpointing != setup.checkpointing else {}
        changes |= {"model.fused_loss": fused_loss} if fused_loss != setup.fused_loss else {}
        changes |= engine | ({COMPILING: False} if compiles != setup.compiles else {})
        if engine:
            is_cast = zero is FSDP2
            changed = replace(changed, half=True, weights_bytes=4 if is_cast else 2)
            changes = without_engine(setup) | changes
            if not setup.half:
                changes["training.bf16"] = True
            if is_cast and trains_half(setup):
                changes["model.dtype"] = "auto"  # fp32 parts, which compute in bfloat16
        yield with_micro_batch(changed, micro_batch, changes)


def takes_fsdp(setup: Setup, target: Target) -> bool:
    """Whether FSDP2 could divide the run over its GPUs, as `cpt.training.fsdp_profile` checks it."""
    is_own_loss, is_divided = setup.beside.stage not in KINDS, setup.zero is not None and setup.zero.is_fsdp
    can_be = setup.gpus > 1 and not target.on_cpu and is_own_loss and not setup.scales_loss and not setup.releases
    return can_be and not is_divided and setup.optimizer == "adamw" and setup.rounding is None and setup.lora is None


def with_small_states(setup: Setup, target: Target) -> Iterator[tuple[Setup, Changes]]:
    """All parameters in bfloat16 without an fp32 copy, with 8-bit states; on one GPU also with released gradients."""
    if setup.lora is not None or target.on_cpu or setup.scales_loss or setup.optimizer not in ("adamw", *IN_8_BIT):
        return
    small = replace(setup, weights_bytes=2, zero=None, half=True)
    is_written = trains_half(setup) and setup.optimizer in IN_8_BIT  # with adamw, bfloat16 may be what `auto` means
    first: Changes = {} if is_written else {"model.dtype": "bfloat16"}
    last = without_engine(setup) | ({} if setup.half else {"training.bf16": True})
    for optimizer, (candidate, changes) in product(IN_8_BIT, with_all_parameters(small, target)):
        changed = replace(candidate, optimizer=optimizer)
        if changed.zero is not None:
            continue
        name = {} if optimizer == setup.optimizer else {"optimizer.name": optimizer}
        yield changed, first | name | changes | last
        if setup.gpus == 1 and setup.beside.stage not in KINDS and not setup.releases:
            is_one_portion = changed.accumulation == 1 and ACCUMULATION not in changes
            tokens = {"budget.global_batch_tokens": changed.micro_batch * changed.sequence_length}
            step = {} if is_one_portion else tokens if changed.batch_is_given else {ACCUMULATION: 1}
            released = {"optimizer.release_gradients": True} | changes | step | {"training.max_grad_norm": 0}
            yield replace(changed, releases=True, accumulation=1), first | name | released | last


def without_engine(setup: Setup) -> Changes:
    """What is removed from a recipe that DeepSpeed or FSDP divides."""
    if setup.zero is None:
        return {}
    if setup.zero.is_fsdp:
        return {"training.fsdp": None, "training.fsdp_config": None}
    return {"training.deepspeed": None}


def with_adapters(setup: Setup, target: Target) -> Iterator[tuple[Setup, Changes]]:
    """The last resort: adapters on weights in half precision."""
    if setup.lora is not None or setup.from_scratch:
        return
    half = setup.half or not target.on_cpu
    lora = replace(setup, lora={"r": 16}, zero=None, half=half, weights_bytes=2 if half else 4)
    for candidate, changes in with_all_parameters(lora, target):
        if candidate.zero is None:
            bf16 = {"training.bf16": True} if half and not setup.half else {}
            yield candidate, {"model.lora": {"r": 16}} | without_engine(setup) | bf16 | changes


def shipped_profiles() -> list[tuple[str, Zero]]:
    """The DeepSpeed profiles that come with cpt, as a recipe names them."""
    read = [
        (f"{PROFILES.name}/{file.name}", zero_of(json.loads(file.read_text())))
        for file in sorted(PROFILES.glob("*.json"))
    ]
    return [(name, zero) for name, zero in read if zero is not None]


def micro_batches(setup: Setup) -> list[int]:
    """The recipe's, and its halves."""
    sizes = [setup.micro_batch]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return sizes


def with_micro_batch(setup: Setup, micro_batch: int, changes: Changes) -> tuple[Setup, Changes]:
    """The same rows in a step, in smaller portions."""
    if micro_batch == setup.micro_batch:
        return setup, changes
    accumulation = setup.accumulation * setup.micro_batch // micro_batch
    portions = {"training.per_device_train_batch_size": micro_batch}
    portions |= {} if setup.batch_is_given else {ACCUMULATION: accumulation}
    beside, steps = setup.beside, setup.beside.steps_per_generation
    if steps is not None:  # so that as many completions are sampled at once
        portions["training.steps_per_generation"] = steps * setup.micro_batch // micro_batch
        beside = replace(beside, steps_per_generation=portions["training.steps_per_generation"])
    return replace(setup, micro_batch=micro_batch, accumulation=accumulation, beside=beside), changes | portions
