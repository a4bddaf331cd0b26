"""What to change so that a run fits: of all ways that fit, the fastest that is nearest to the recipe."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from cpt.planner.activations import Counted
from cpt.planner.facts import ModelFacts
from cpt.planner.memory import MemoryPlan, plan_memory
from cpt.planner.optimizer_terms import IN_8_BIT, trains_half
from cpt.planner.setup import Setup, Zero, zero_of
from cpt.planner.speed import assumed_mfu, planned_speed
from cpt.planner.stages import KINDS, WHOLE
from cpt.planner.target import Target
from cpt.planner.terms import GIB
from cpt.recipe.references import REPOSITORY

USABLE = 0.98  # of the memory on a GPU's data sheet: the rest is its own
USABLE_OF_HOST = 0.92  # the system and other programs have the rest
CHANGE = 1.03  # how much slower a plan may be for one change fewer
CAREFUL = 0.95  # of what a run can have, for what is proposed
UNKNOWN_HOST = 1.1  # so much slower may be what does not rest on a host that nobody has described
ACCUMULATION, COMPILING = "training.gradient_accumulation_steps", "training.torch_compile"
HALVED = 1.05  # fewer tokens at once keep a GPU less busy; a guess
PROFILES = REPOSITORY / "deepspeed_configs"
SYNCS = "training.accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
FSDP2 = Zero(3, is_fsdp=True, reduces_each_micro_batch=True)
Count = Callable[[Setup], tuple[ModelFacts, Counted]]


@dataclass(frozen=True)
class Proposal:
    """A way that fits."""

    setup: Setup
    plan: MemoryPlan
    changes: dict[str, Any] = field(default_factory=dict)
    """Keys of the recipe, with dots, and what to write there."""
    slower: float = 1.0
    """How many times the recipe's own time, if that fitted."""
    others: tuple["Proposal", ...] = ()
    """Other kinds of ways that fit, the next cheapest first."""


def fits(plan: MemoryPlan, target: Target, share: float = 1.0) -> bool:
    """The GPU, and the host where anybody knows how much it has."""
    return gpu_room(plan, target, share) >= 0 and (not target.host_is_known or host_room(plan, target) >= 0)


def host_that_is_needed(plan: MemoryPlan) -> float:
    """GiB of a machine that has room for it beside the system."""
    return plan.host.size / USABLE_OF_HOST / GIB


def gpu_room(plan: MemoryPlan, target: Target, share: float = 1.0) -> float:
    """Bytes that stay free at the peak; negative: what is missing."""
    return share * (USABLE_OF_HOST if target.on_cpu else USABLE) * target.memory_gib * GIB - plan.peak.size


def host_room(plan: MemoryPlan, target: Target) -> float:
    """The same of the host."""
    return USABLE_OF_HOST * target.host_memory_gib * GIB - plan.host.size


def cheapest_that_fits(
    setup: Setup, target: Target, count: Count, *, mfu: float, share: float = 1.0
) -> Proposal | None:
    """All parameters with the recipe's own optimizer, or else other ways; the least time, where a change counts for
    three per cent of it.

    Where the first fits in no way, or only in more host memory than is known of, adapters and weights in bfloat16 with
    moments in 8 bit are
    given too: the reader knows which will do.
    """
    known: dict[tuple[Any, ...], tuple[ModelFacts, Counted]] = {}

    def counted(candidate: Setup) -> tuple[ModelFacts, Counted]:
        """Counted once for all micro-batches and optimizers."""
        lora = tuple((candidate.lora or {}).items())
        what = (candidate.as_computed.weights_bytes, candidate.compiles, candidate.zero is None, lora)
        if what not in known:
            known[what] = count(candidate)
        return known[what]

    def judge(candidate: Setup, changes: dict[str, Any]) -> tuple[float, Proposal] | None:
        facts, activations = counted(candidate)
        plan = plan_memory(facts, candidate, activations)
        room = share * (CAREFUL if changes else 1)
        if not fits(plan, target, room):
            return None
        reached = mfu * assumed_mfu(candidate) / assumed_mfu(setup)
        seconds = setup.tokens_per_step / planned_speed(facts, candidate, target, reached).tokens_per_second
        halvings = math.log2(max(1, setup.micro_batch / candidate.micro_batch))
        number = len(
            changes.keys() - {ACCUMULATION, COMPILING, SYNCS}
        )  # they follow from the micro-batch and the engine
        unsure = (
            UNKNOWN_HOST
            if not target.host_is_known and candidate.zero is not None and candidate.zero.offload_optimizer
            else 1
        )
        return seconds * CHANGE**number * HALVED**halvings * unsure, Proposal(candidate, plan, changes, seconds)

    own_facts, _ = counted(setup)
    own_seconds = setup.tokens_per_step / planned_speed(own_facts, setup, target, mfu).tokens_per_second
    found: list[Proposal] = []
    for kinds in (
        (with_all_parameters(setup, target),),
        (with_small_states(setup, target), with_adapters(setup, target)),
    ):
        ways: list[tuple[float, Proposal]] = []
        for candidates in kinds:
            judged = [way for candidate, changes in candidates if (way := judge(candidate, changes)) is not None]
            ways += [min(judged, key=lambda pair: pair[0])] if judged else []
        found += [replace(way, slower=way.slower / own_seconds) for _, way in sorted(ways, key=lambda pair: pair[0])]
        if found and not rests_on_unknown_host(found[0], target):
            break
    return replace(found[0], others=tuple(found[1:])) if found else None


def rests_on_unknown_host(proposal: Proposal, target: Target) -> bool:
    """Whether it takes more host memory than anybody has promised."""
    return not target.host_is_known and host_room(proposal.plan, target) < 0


def with_all_parameters(setup: Setup, target: Target) -> Iterator[tuple[Setup, dict[str, Any]]]:
    """Every combination of micro-batch, checkpointing, fused loss and engine; adapters stay where the recipe has
    them."""
    engines: list[tuple[dict[str, Any], Zero | None]] = [({}, setup.zero)]
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
        changes = changes_between(setup, changed) | engine | ({COMPILING: False} if compiles != setup.compiles else {})
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
    """Whether FSDP2 could divide the run over its GPUs, as `cpt.stages.fsdp_profile` checks it."""
    is_own_loss, is_divided = setup.beside.stage not in KINDS, setup.zero is not None and setup.zero.is_fsdp
    can_be = setup.gpus > 1 and not target.on_cpu and is_own_loss and not setup.scales_loss and not setup.releases
    return can_be and not is_divided and setup.optimizer == "adamw" and setup.rounding is None and setup.lora is None


def with_small_states(setup: Setup, target: Target) -> Iterator[tuple[Setup, dict[str, Any]]]:
    """All parameters in bfloat16 without a copy in fp32, moments in 8 bit; on one GPU also with gradients that never
    add up."""
    if setup.lora is not None or target.on_cpu or setup.scales_loss or setup.optimizer not in ("adamw", *IN_8_BIT):
        return
    small = replace(setup, weights_bytes=2, zero=None, half=True)
    is_written = trains_half(setup) and setup.optimizer in IN_8_BIT  # with adamw, bfloat16 may be what `auto` means
    first: dict[str, Any] = {} if is_written else {"model.dtype": "bfloat16"}
    last = without_engine(setup) | ({} if setup.half else {"training.bf16": True})
    for optimizer, candidate in product(IN_8_BIT, with_all_parameters(small, target)):
        changed, changes = replace(candidate[0], optimizer=optimizer), candidate[1]
        if changed.zero is not None:
            continue
        name = {} if optimizer == setup.optimizer else {"optimizer.name": optimizer}
        yield changed, first | name | changes | last
        if setup.gpus == 1 and setup.beside.stage not in KINDS and not setup.releases:
            yield (
                released(changed),
                first | name | {"optimizer.release_gradients": True} | one_portion(changed, changes) | last,
            )


def released(setup: Setup) -> Setup:
    """A step of one micro-batch, each of whose gradients is dropped when it was used."""
    return replace(setup, releases=True, accumulation=1)


def one_portion(setup: Setup, changes: dict[str, Any]) -> dict[str, Any]:
    """The changes with a step of one micro-batch, whose gradients are not clipped."""
    step = (
        {"budget.global_batch_tokens": setup.micro_batch * setup.sequence_length}
        if setup.batch_is_given
        else {ACCUMULATION: 1}
    )
    is_same = setup.accumulation == 1 and ACCUMULATION not in changes
    return changes | ({} if is_same else step) | {"training.max_grad_norm": 0}


def without_engine(setup: Setup) -> dict[str, Any]:
    """What is taken out of a recipe that DeepSpeed or FSDP divides."""
    if setup.zero is None:
        return {}
    return (
        {"training.fsdp": None, "training.fsdp_config": None} if setup.zero.is_fsdp else {"training.deepspeed": None}
    )


def with_adapters(setup: Setup, target: Target) -> Iterator[tuple[Setup, dict[str, Any]]]:
    """The last way out: adapters on weights in half precision."""
    if setup.lora is not None or setup.from_scratch:
        return
    lora = replace(setup, lora={"r": 16}, zero=None, half=setup.half or not target.on_cpu)
    lora = replace(lora, weights_bytes=2 if lora.half else 4)
    for candidate, changes in with_all_parameters(lora, target):
        if candidate.zero is None:
            half = {"training.bf16": True} if lora.half and not setup.half else {}
            yield candidate, {"model.lora": {"r": 16}} | without_engine(setup) | half | changes


def shipped_profiles() -> list[tuple[str, Zero]]:
    """Those that come with cpt, as a recipe names them."""
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


def changes_between(setup: Setup, changed: Setup) -> dict[str, Any]:
    """In the recipe's words."""
    changes: dict[str, Any] = {}
    if changed.checkpointing != setup.checkpointing:
        changes["training.gradient_checkpointing"] = changed.checkpointing
    if changed.fused_loss != setup.fused_loss:
        changes["model.fused_loss"] = changed.fused_loss
    return changes


def with_micro_batch(setup: Setup, micro_batch: int, changes: dict[str, Any]) -> tuple[Setup, dict[str, Any]]:
    """The same rows in a step, in smaller portions."""
    if micro_batch == setup.micro_batch:
        return setup, changes
    accumulation = setup.accumulation * setup.micro_batch // micro_batch
    portions = {"training.per_device_train_batch_size": micro_batch}
    portions |= {} if setup.batch_is_given else {ACCUMULATION: accumulation}
    beside, steps = setup.beside, setup.beside.steps_per_generation
    if steps is not None:  # as many completions are sampled at once
        portions["training.steps_per_generation"] = steps * setup.micro_batch // micro_batch
        beside = replace(beside, steps_per_generation=portions["training.steps_per_generation"])
    return replace(setup, micro_batch=micro_batch, accumulation=accumulation, beside=beside), changes | portions
