"""Does a way to train fit the machine? The planner's answer for each way that we would choose, the best first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cpt.errors import RecipeError
from cpt.hardware import GIB
from cpt.init.base_model import BaseModel
from cpt.models.adapter_targets import adaptable
from cpt.models.adapters import count_lora_parameters
from cpt.planner.activations import Counted, count_activations
from cpt.planner.advice import gpu_room, shipped_profiles
from cpt.planner.compiling import reasons_of
from cpt.planner.facts import ModelFacts, facts_of
from cpt.planner.memory import MemoryPlan, plan_memory, states_of
from cpt.planner.setup import Setup
from cpt.planner.speed import planned_speed
from cpt.planner.target import Target

PROFILES = ("ds_config_zero1.json", "ds_config_production.json", "ds_config_prototype.json", "ds_config_8b_24gb.json")
MOST_FOR_ZERO2 = (
    4_000_000_000  # parameters: above, so little is left of 24 GB that each micro-batch is too small for its transfers
)
MICRO_BATCHES = (16, 8, 4, 2, 1)
MOST_TOKENS = 32_768  # in a micro-batch: more is no faster
FEWEST_TOKENS = 8_192  # fewer leave a GPU idle, so that computing activations twice costs less
ADAPTERS_ONLY = {"r": 64, "lora_alpha": 16, "use_rslora": True}
CAREFUL = 0.94  # of what a run can have: a recipe that is proposed must not end at its first long row
STEP_TOKENS = 524_288  # what a step has about, for what is done once in it


@dataclass(frozen=True)
class Method:
    """A way to train, before rows are chosen."""

    name: str
    """full, lora (with embeddings) or adapters."""
    profile: str | None
    """DeepSpeed profile in deepspeed_configs/."""
    setup: Setup
    """With one row at once, and nothing computed again."""
    base: BaseModel
    trained: int = 0
    """Parameters that learn."""

    @cached_property
    def facts(self) -> ModelFacts:
        """Of the model with what is put on it."""
        return facts_of(self.base.model.config, self.setup.lora, self.setup.sequence_length)

    @cached_property
    def activations(self) -> Counted:
        """Of one row, and of two."""
        return count_activations(self.base.model.config, self.setup)

    @property
    def states_gib(self) -> float:
        """On each GPU before the first token; on the host where there is none."""
        return sum(term.size for term in states_of(self.facts, self.setup)) / GIB

    @property
    def host_gib(self) -> float:
        """Of a machine's own memory."""
        return self.plan(self.setup).host.size / GIB

    def plan(self, setup: Setup) -> MemoryPlan:
        """With these rows."""
        return plan_memory(self.facts, setup, self.activations)


@dataclass(frozen=True)
class Fit:
    """A way to train that fits, and how many rows go through at once."""

    method: Method
    setup: Setup
    memory_gib: float
    """On each GPU, of what it has; estimated."""

    @property
    def micro_batch(self) -> int:
        """Rows at once."""
        return self.setup.micro_batch

    @property
    def checkpointing(self) -> bool:
        """Layers are computed again in the backward pass."""
        return self.setup.checkpointing

    def hours(self, target: Target, tokens: int, mfu: float) -> float:
        """Of the whole run; evaluation and saving come on top."""
        accumulation = max(1, STEP_TOKENS // (self.setup.rows_at_once * self.setup.sequence_length))
        return planned_speed(self.method.facts, replace(self.setup, accumulation=accumulation), target, mfu).hours(
            tokens
        )


def ways_to_train(
    base: BaseModel, target: Target, sequence_length: int, *, is_short: bool = False
) -> Iterator[Method]:
    """All parameters before adapters, on the GPU before on the host: the first that fits is taken.

    Args:
        is_short: the run has too few steps to compile its layers.
    """
    gpus, parameters = max(1, target.gpus), base.parameters
    plain = Setup(
        gpus=gpus,
        on_cpu=target.on_cpu,
        micro_batch=1,
        sequence_length=sequence_length,
        accumulation=2,
        half=not target.on_cpu,
        weights_bytes=4 if target.on_cpu else 2,
        checkpointing=False,
        fused_loss=not target.on_cpu,
        packed=base.packs_documents,
        attention="sdpa",
        optimizer="adamw",
        lora=None,
        zero=None,
        compiles=not target.on_cpu and not is_short and not any(reasons_of(base.model, selective=False).values()),
    )
    if gpus == 1:
        yield Method("full", None, plain, base, parameters)
    shipped = {path.rpartition("/")[2]: zero for path, zero in shipped_profiles()}
    for profile in PROFILES:
        zero = shipped.get(profile)
        if zero is None or target.on_cpu or gpus == 1 and not zero.offload_optimizer:
            continue
        if zero.stage == 2 and parameters > MOST_FOR_ZERO2:
            continue
        yield Method(
            "full",
            profile,
            replace(plain, zero=zero, weights_bytes=2, compiles=plain.compiles and zero.stage < 3),
            base,
            parameters,
        )
    yield from with_adapters(base, plain)


def with_adapters(base: BaseModel, plain: Setup) -> Iterator[Method]:
    """LoRA with embeddings and head where the model lets us, then without."""
    options: dict[str, Any]
    for name, options in (("lora", {"preset": "cpt"}), ("adapters", ADAPTERS_ONLY)):
        if next(adaptable(base.model), None) is None:
            return
        try:
            trained = count_lora_parameters(base.model, options)
        except RecipeError:  # a tied head that peft cannot follow
            continue
        yield Method(name, None, replace(plain, lora=options, weights_bytes=4 if plain.on_cpu else 2), base, trained)


def fit(method: Method, base: BaseModel, target: Target, sequence_length: int) -> Fit | None:
    """The largest micro-batch that fits, with activations kept where they can be; None where not even one row does."""
    micro_batches = [size for size in MICRO_BATCHES if size * sequence_length <= max(MOST_TOKENS, sequence_length)]
    for checkpointing in (False,) if target.on_cpu else (False, True):
        for micro_batch in micro_batches:
            tokens = micro_batch * sequence_length
            setup = replace(method.setup, micro_batch=micro_batch, checkpointing=checkpointing)
            plan = method.plan(setup)
            is_worth_it = (
                checkpointing or target.on_cpu or tokens >= min(FEWEST_TOKENS, micro_batches[0] * sequence_length)
            )
            if is_worth_it and gpu_room(plan, target, CAREFUL) >= 0 and has_host(method, target):
                return Fit(method, setup, plan.peak.size / GIB)
    return None


def has_host(method: Method, target: Target) -> bool:
    """Where nobody said what the host has, it counts only for what is kept there throughout."""
    zero = method.setup.zero
    is_judged = target.host_is_known or zero is not None and zero.offload_optimizer
    return not is_judged or method.host_gib <= target.host_memory_gib


def with_micro_batch(chosen: Fit, micro_batch: int) -> Fit:
    """The same with fewer rows at once."""
    setup = replace(chosen.setup, micro_batch=micro_batch)
    return Fit(chosen.method, setup, chosen.method.plan(setup).peak.size / GIB)
