"""How well a way to train suits the links between machines, and which others suit them better."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from cpt.planner.advice import CAREFUL, Count, fits, shipped_profiles, with_micro_batch
from cpt.planner.facts import ModelFacts
from cpt.planner.memory import plan_memory
from cpt.planner.setup import Setup, Zero
from cpt.planner.speed import Speed, planned_speed
from cpt.planner.target import Target

BETTER = 1.05  # so much faster another way must be to be told of
GOOD = 0.8  # share of a step that computing should have
MICRO_BATCHES = (2, 4, 8, 16, 32)
MOST_ACCUMULATION = 64


@dataclass(frozen=True)
class Way:
    """Another way to run the recipe."""

    name: str
    changes: str
    """What to write, in words; empty where nothing is to be written."""
    speed: Speed
    keeps_training: bool = True
    """False where the model learns otherwise: in larger steps, or in adapters."""


def better_ways(
    setup: Setup, own: Speed, target: Target, count: Count, *, mfu: float, share: float = 1.0
) -> list[Way]:
    """Those that fit and are clearly faster, the fastest first; those that train otherwise only where no other reaches
    `GOOD`."""
    counted = lru_cache(maxsize=None)(
        lambda each, lora: count(replace(setup, weights_bytes=each, lora={"r": 16} if lora else setup.lora))
    )

    def judged(name: str, changes: str, candidate: Setup, *, keeps: bool = True) -> Way | None:
        is_new_lora = candidate.lora is not None and setup.lora is None
        facts, activations = counted(candidate.weights_bytes, is_new_lora)
        if not fits(plan_memory(facts, candidate, activations), target, share * CAREFUL):
            return None
        speed = planned_speed(facts, candidate, target, mfu)
        return Way(name, changes, speed, keeps) if speed.tokens_per_second > BETTER * own.tokens_per_second else None

    found = [
        best_of(judged(*way) for way in with_micro_batches(*stage))
        for stage in (("", "", setup), *other_stages(setup))
    ]
    if max([own.efficiency, *(way.speed.efficiency for way in found if way is not None)]) < GOOD:
        facts, _ = counted(setup.weights_bytes, False)
        found += [judged(*other, keeps=False) for other in other_training(setup, facts, target, mfu)]
    return sorted((way for way in found if way is not None), key=lambda way: -way.speed.tokens_per_second)


def best_of(ways: Iterable[Way | None]) -> Way | None:
    """The first that is about as fast as the fastest."""
    there = [way for way in ways if way is not None]
    most = max((way.speed.tokens_per_second for way in there), default=0.0)
    return next((way for way in there if BETTER * way.speed.tokens_per_second > most), None)


def with_micro_batches(name: str, changes: str, stage: Setup) -> Iterator[tuple[str, str, Setup]]:
    """As it is, and with larger micro-batches where that makes less communication: the same steps."""
    if name:
        yield name, changes, stage
    for times in MICRO_BATCHES:
        if stage.accumulation % times == 0 and stage.zero is not None and stage.zero.stage > 1:
            larger, _ = with_micro_batch(stage, times * stage.micro_batch, {})
            written = f"training.per_device_train_batch_size: {larger.micro_batch}"
            yield (
                f"{name or told_stage(stage)}, {larger.micro_batch} rows at once",
                ", ".join(filter(None, (changes, written))),
                larger,
            )


def other_stages(setup: Setup) -> Iterator[tuple[str, str, Setup]]:
    """As profiles, of which some are shipped."""
    own = setup.zero
    shipped = {zero.stage: path for path, zero in shipped_profiles() if not zero.offload_optimizer}
    for stage in (1, 2, 3):
        if own is not None and not own.is_fsdp and own.stage == stage:
            continue
        changes = (
            f"training.deepspeed: {shipped[stage]}"
            if stage in shipped and not has_offload(own)
            else f"`stage: {stage}` in the profile"
        )
        base = own if own is not None and not own.is_fsdp else Zero(stage)
        zero = replace(
            base, stage=stage, overlap_comm=stage == 3, offload_parameters=base.offload_parameters and stage == 3
        )
        if own is not None and own.is_fsdp:
            changes += ", no training.fsdp"
        yield f"ZeRO-{stage}", changes, replace(setup, zero=zero, half=True, weights_bytes=2)
    if (
        own is not None
        and own.stage == 3
        and not own.is_fsdp
        and own.secondary == 1
        and setup.nodes > 1
        and setup.gpus_per_node > 1
    ):
        zero = replace(own, secondary=setup.gpus_per_node)
        changes = f"`zero_hpz_partition_size: {setup.gpus_per_node}` in the profile"
        yield "ZeRO-3 with a copy of the weights in each machine", changes, replace(setup, zero=zero)


def other_training(setup: Setup, facts: ModelFacts, target: Target, mfu: float) -> Iterator[tuple[str, str, Setup]]:
    """Larger steps, where gradients are told once for each, and adapters."""
    for name, changes, stage in [(told_stage(setup), "", setup), *other_stages(setup)]:
        if stage.zero is not None and stage.zero.stage > 1:
            continue
        times = 2
        while (
            times < MOST_ACCUMULATION and planned_speed(facts, with_steps(stage, times), target, mfu).efficiency < GOOD
        ):
            times *= 2
        larger = with_steps(stage, times)
        written = f"budget.global_batch_tokens: {larger.tokens_per_step}"
        yield (
            f"{name}, steps of {larger.tokens_per_step:,} tokens",
            ", ".join(filter(None, (changes, written))),
            larger,
        )
    if setup.lora is None:
        lora = replace(setup, lora={"r": 16}, zero=None, half=True, weights_bytes=2)
        yield (
            "adapters, without ZeRO",
            "model.lora: {r: 16}"
            + ("" if setup.zero is None else ", no training." + ("fsdp" if setup.zero.is_fsdp else "deepspeed")),
            lora,
        )


def with_steps(setup: Setup, times: int) -> Setup:
    """With so many times the accumulation."""
    return replace(setup, accumulation=times * setup.accumulation)


def speed_of_one_machine(
    setup: Setup, target: Target, count: Count, *, mfu: float, share: float = 1.0
) -> Speed | None:
    """Of the same steps on one of the machines alone; None where they do not fit it."""
    alone = replace(setup, nodes=1, gpus=setup.gpus_per_node, accumulation=setup.accumulation * setup.nodes)
    facts, activations = count(alone)
    machine = replace(target, gpus=alone.gpus)
    return (
        planned_speed(facts, alone, machine, mfu)
        if fits(plan_memory(facts, alone, activations), machine, share)
        else None
    )


def told_stage(setup: Setup) -> str:
    """`ZeRO-3`, or `DDP`."""
    if setup.zero is None:
        return "DDP"
    return "FSDP2" if setup.zero.is_fsdp else f"ZeRO-{setup.zero.stage}"


def has_offload(zero: Zero | None) -> bool:
    """Whether states lie on the host."""
    return zero is not None and zero.offload_optimizer
