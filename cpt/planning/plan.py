"""Plan a run without starting it: count the model, add up its memory, and describe the plan in sentences."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from cpt.distributed import print_once
from cpt.errors import RecipeError, ResourceError
from cpt.formatting import format_bytes
from cpt.hardware import GIB
from cpt.models.config import config_from, load_config
from cpt.models.inventory import build_on_meta
from cpt.optim.build import check_release
from cpt.planning.activations import ActivationCounts
from cpt.planning.check_resources import disk_needs
from cpt.planning.fitting import (
    USABLE,
    USABLE_OF_HOST,
    FittingPlan,
    cheapest_that_fits,
    with_chosen_values,
)
from cpt.planning.gate import setting_mistakes
from cpt.planning.memory import SAMPLING, MemoryPlan, count_model, plan_memory
from cpt.planning.memory_parts import MemorySnapshot
from cpt.planning.model_sizes import ModelSizes
from cpt.planning.speed import Speed, Target, measured_speed, planned_speed
from cpt.planning.workload import Setup, attention_on_gpu, read_setup
from cpt.recipe.keys import micro_batches_per_step
from cpt.recipe.rules import REWARDED
from cpt.recipe.schema import Model, Recipe
from cpt.recipe.values import in_yaml
from cpt.training.arguments import check_generations
from cpt.training.engine_profiles import check_fsdp, read_profile

log = logging.getLogger("cpt")


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    recipe: Recipe
    """Each `auto` is replaced by a value."""
    config: PreTrainedConfig
    setup: Setup
    facts: ModelSizes
    activations: ActivationCounts
    memory: MemoryPlan

    def count(self, setup: Setup) -> tuple[ModelSizes, ActivationCounts]:
        return count_model(self.config, setup)


def plan_recipe(recipe: Recipe, target: Target, gpus: int, nodes: int) -> PlannedRun:
    """Count the model's parameters and add up the memory of a run.

    Args:
        gpus: GPUs of all machines together.

    Raises:
        CptError: the recipe cannot run there, or the model's config cannot be read.
    """
    micro_batches_per_step(recipe, gpus)  # refuses processes that cannot divide the global batch
    if recipe.stage in REWARDED:
        check_generations(recipe, gpus)
    check_release(recipe, deepspeed=bool(recipe.training.get("deepspeed")), processes=gpus)
    complaints = check_fsdp(recipe, on_this_machine=False)
    if complaints:
        raise RecipeError("\n".join(complaints))
    config = config_without_weights(recipe.model)
    recipe = with_chosen_values(recipe, config=config, target=target, processes=gpus, nodes=nodes)
    profile = None
    if recipe.training.get("deepspeed"):
        profile = read_profile(recipe.training["deepspeed"])
    setup = read_setup(
        recipe,
        gpus,
        profile,
        attention=attention_on_gpu(recipe, config),
        on_cpu=target.on_cpu,
        nodes=nodes,
    )
    facts, activations = count_model(config, setup)
    memory = plan_memory(
        facts,
        setup,
        activations,
        workers=int(recipe.training.get("dataloader_num_workers", 0)),
        snapshot=recipe.checkpoints.in_background,
    )
    return PlannedRun(
        recipe=recipe,
        config=config,
        setup=setup,
        facts=facts,
        activations=activations,
        memory=memory,
    )


def config_without_weights(model: Model) -> PreTrainedConfig:
    """Return the model's config, from the recipe if the Hub cannot be reached."""
    try:
        return load_config(model)
    except ResourceError as problem:
        if model.config is None:
            shape = "Or write `model.config`, as in recipes/models."
            raise ResourceError(f"{problem} {shape}") from problem
        unchecked = "The plan is for `model.config`, not compared with it."
        log.warning(f"model.path: {model.path} cannot be read here. {unchecked}")
        return config_from(model.config)


def propose_changes(
    recipe: Recipe,
    planned: PlannedRun,
    target: Target,
    *,
    mfu: float,
    load_changed: Callable[[Mapping[str, Any]], Recipe],
) -> FittingPlan | None:
    """Return the cheapest change that makes the run fit, among those that `cpt check` accepts."""
    model = None
    with suppress(Exception):  # custom model code; `cpt check` reports its errors
        model = build_on_meta(planned.config)
    mistakes = setting_mistakes(recipe, model)

    def is_allowed(changes: Mapping[str, Any]) -> bool:
        try:
            changed = load_changed(changes)
        except RecipeError:
            return False
        return setting_mistakes(changed, model) <= mistakes

    return cheapest_that_fits(
        planned.setup,
        target,
        planned.count,
        mfu=mfu,
        share=target.usable_share(recipe.safety.max_gpu_memory),
        is_allowed=is_allowed,
    )


# --- the plan in sentences ---


def print_plan(
    planned: PlannedRun,
    target: Target,
    *,
    mfu: float,
    measured: Path | None,
    price: float | None,
) -> None:
    """Print what is trained, memory, speed and disk.

    Args:
        measured: a run to take the speed from; by default it is estimated from `mfu`.
        price: of an hour of a GPU.
    """
    print_once(f"{format_setup(planned, target)}\n")
    limit = planned.recipe.safety.max_gpu_memory
    share = target.usable_share(limit)
    print_once("\n".join(format_memory(planned, target, share)))
    if limit is not None and target.on_cpu:
        print_once("  `safety.max_gpu_memory` has no effect on a CPU.")
    elif limit is not None:
        print_once(f"  `safety.max_gpu_memory` leaves the run {limit:.0%} of each GPU.")
    speed = planned_speed(planned.facts, planned.setup, target, mfu)
    if measured is not None:
        speed = measured_speed(measured)
    print_once(f"\n{format_speed(speed, planned, target, price)}")
    if planned.setup.sampled and measured is None:
        print_once(
            "  Sampling and scoring completions are not included; use --measured RUN to include them."
        )
    print_once(f"{format_disk(planned)}\n")


def print_proposals(proposal: FittingPlan, target: Target) -> None:
    is_cheapest = all(proposal.slower <= other.slower for other in proposal.others)
    rank = "cheapest" if is_cheapest else "nearest"
    print_once(f"The {rank} change that makes it fit:")
    print_once("\n".join(format_changes(proposal, target)))
    for other in proposal.others:
        print_once("Another change that makes it fit:")
        print_once("\n".join(format_changes(other, target)))


def format_setup(planned: PlannedRun, target: Target) -> str:
    """Such as `1.5B parameters (qwen2), all trained; no ZeRO; 2 x 4,096 tokens per micro-batch, ...`."""
    setup = planned.setup
    facts = planned.facts
    trained = "all trained"
    if setup.lora is not None:
        trained = f"{facts.trained / 1e6:,.0f}M of them trained, in adapters"
    elif facts.trained < facts.parameters:
        trained = f"{facts.trained / 1e6:,.0f}M of them trained"
    batch = f"{setup.sequences} x {setup.length:,} tokens per micro-batch"
    if setup.needs.sequences > 1:
        batch += f" ({setup.micro_batch} pairs)"
    parts = [
        f"{facts.parameters / 1e9:.3g}B parameters ({facts.name}), {trained}",
        format_sharding(setup),
        f"{batch}, {setup.tokens_per_step:,} per step",
        format_devices(setup, target),
    ]
    return f"{'; '.join(parts)}."


def format_sharding(setup: Setup) -> str:
    if setup.zero is None:
        return "no ZeRO"
    sharding = "FSDP2" if setup.zero.is_fsdp else f"ZeRO-{setup.zero.stage}"
    on_host = []
    if setup.zero.offload_optimizer:
        on_host.append("the optimizer")
    if setup.zero.offload_parameters:
        on_host.append("the weights")
    if on_host:
        sharding += f" with {' and '.join(on_host)} on the host"
    return sharding


def format_devices(setup: Setup, target: Target) -> str:
    if target.on_cpu:
        processes = "processes" if setup.gpus > 1 else "process"
        return f"{setup.gpus} {processes} on the CPU"
    devices = f"{setup.gpus} x {target.name}"
    if setup.nodes > 1:
        devices += f" in {setup.nodes} machines"
    return devices


def format_memory(planned: PlannedRun, target: Target, share: float) -> Iterator[str]:
    """Yield the lines of the tables and what they mean.

    Args:
        share: of the GPU's memory that the run may use.
    """
    setup = planned.setup
    plan = planned.memory
    if target.on_cpu:
        yield format_table(f"Memory of all processes, at its peak ({plan.peak.name}):", plan.peak)
        usable = USABLE_OF_HOST * share * target.memory_gib
        yield format_fit("the machine", target.memory_gib, usable, plan.peak.size)
    else:
        yield format_table(f"Memory of each GPU, at its peak ({plan.peak.name}):", plan.peak)
        usable = USABLE * share * target.memory_gib
        yield format_fit(target.name, target.memory_gib, usable, plan.peak.size)
        yield ""
        machines = "the host" if setup.nodes == 1 else "each machine's host"
        yield format_table(f"Memory of {machines}:", plan.host)
        if target.host_is_known:
            usable = USABLE_OF_HOST * target.host_memory_gib
            host = f"the host ({target.host_source})"
            yield format_fit(host, target.host_memory_gib, usable, plan.host.size)
        else:
            needed_gib = host_memory_needed_gib(plan)
            yield f"  Needs a host with {needed_gib:.0f} GiB; set yours with --host-memory."
    if not plan.is_counted:
        yield "  The activations are estimated: this architecture's code cannot run without values."
    needs = setup.needs
    if needs.reference and setup.lora is None:
        yield "  An adapter (`model.lora`) needs no reference model; ZeRO-3 shards it over GPUs."
    if plan.peak.name == SAMPLING:
        remedy = "`training.steps_per_generation`, or shorter ones: `max_completion_length`"
        if needs.stage == "gkd":
            remedy = "`max_new_tokens`"
        yield f"  Sampling needs the most memory: {setup.sampled} completions at once. Lower {remedy}."
    if needs.uncounted:
        yield f"  Not counted: {'; '.join(needs.uncounted)}."


def host_memory_needed_gib(plan: MemoryPlan) -> float:
    """Memory of the smallest host that fits."""
    return plan.host.size / USABLE_OF_HOST / GIB


def format_table(title: str, snapshot: MemorySnapshot) -> str:
    lines = [f"{title:<48}{'GiB':>8}"]
    for term in snapshot.terms:
        lines.append(f"  {term.name:<46}{term.size / GIB:>8.2f}  {term.note}".rstrip())
    lines.append(f"  {'sum':<46}{snapshot.size / GIB:>8.2f}")
    return "\n".join(lines)


def format_fit(owner: str, memory_gib: float, usable_gib: float, size: float) -> str:
    """Compare `size`, in bytes, with what a run can use of the memory of `owner`."""
    size_gib = size / GIB
    usable = f"{usable_gib:.1f} GiB of {memory_gib:.4g} that a run can use on {owner}"
    if size_gib > usable_gib:
        return f"  Does not fit: {size_gib - usable_gib:.1f} GiB more than the {usable}."
    return f"  Fits: {size_gib / usable_gib:.0%} of the {usable}."


def format_speed(speed: Speed, planned: PlannedRun, target: Target, price: float | None) -> str:
    text = f"Speed: {speed.tokens_per_second:,.0f} tokens/s ({speed.source})"
    tokens = planned.recipe.budget.tokens
    if tokens is None:
        return f"{text}. The budget is in epochs: `cpt mixture` counts the tokens."
    hours = speed.hours(tokens)
    duration = f"{hours / 24:.1f} days" if hours > 48 else f"{hours:.1f} hours"
    cost = ""
    if price is not None:
        cost = f", {hours * max(1, target.gpus) * price:,.0f} at {price:g} per GPU hour"
    waits = f"\n  {speed.waits}." if speed.waits else ""
    return f"{text}: {duration} for {tokens:,} tokens{cost}, without evaluation and saving.{waits}"


def format_disk(planned: PlannedRun) -> str:
    needs = disk_needs(planned.recipe, planned.facts, planned.setup)
    return (
        f"Disk: {format_bytes(needs.total)}: {needs.checkpoints_at_once} checkpoints of"
        f" {format_bytes(needs.checkpoint)} at once, and the model of {format_bytes(needs.export)}."
    )


def format_changes(proposal: FittingPlan, target: Target) -> Iterator[str]:
    for key, value in proposal.changes.items():
        yield f"  {key}: {in_yaml(value)}"
    size = f"{proposal.plan.peak.size / GIB:.1f} GiB on each GPU"
    if not target.on_cpu:
        size += f", {proposal.plan.host.size / GIB:.0f} GiB on the host"
    yield (
        f"  Then {size}, about {proposal.slower:.2f} times the time that the unchanged recipe would take."
    )
    if "model.dtype" in proposal.changes:
        yield "  Each update rounds the weights to bfloat16, without an fp32 copy; see docs/reference/training.md."
    if proposal.setup.releases:
        tokens = f"{proposal.setup.tokens_per_step:,}"
        yield f"  A step is one micro-batch of {tokens} tokens, and gradients are not clipped."
