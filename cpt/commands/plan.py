"""`cpt plan RECIPE --gpu NAME`: estimate a run's memory, time and cost, and propose changes that make it fit."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import PreTrainedConfig

from cpt.command_line import Force, Gpu, Overrides, RecipePath, refuse_ignored
from cpt.distributed import print_once
from cpt.errors import RecipeError, ResourceError
from cpt.formatting import format_bytes
from cpt.hardware import GIB, find_gpus
from cpt.models.config import config_from, load_config
from cpt.models.inventory import build_on_meta
from cpt.optim.build import check_release
from cpt.planning.activations import ActivationCounts, count_activations
from cpt.planning.check_resources import disk_needs
from cpt.planning.dry_run import dry_run
from cpt.planning.fitting import (
    USABLE,
    USABLE_OF_HOST,
    Changes,
    FittingPlan,
    cheapest_that_fits,
    fits,
    with_chosen_values,
)
from cpt.planning.gate import setting_mistakes
from cpt.planning.memory import SAMPLING, MemoryPlan, count_model, plan_memory
from cpt.planning.memory_parts import MemorySnapshot
from cpt.planning.model_sizes import WHOLE, ModelSizes
from cpt.planning.speed import (
    Speed,
    Target,
    assumed_mfu,
    find_target,
    measured_speed,
    named_gpus,
    planned_speed,
)
from cpt.planning.workload import Setup, attention_on_gpu, read_setup
from cpt.recipe.keys import micro_batches_per_step
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.recipe.rules import REWARDED
from cpt.recipe.schema import Model, Recipe
from cpt.recipe.values import in_yaml, write_yaml
from cpt.training.engine_profiles import check_fsdp, read_profile
from cpt.training.generations import check_generations

log = logging.getLogger("cpt")

DOES_NOT_FIT = 3  # the exit code: 2 is a mistake in the recipe
ON_A_GPU = ("bf16", "fp16", "tf32", "deepspeed", "fsdp")


def command(
    recipe: RecipePath,
    overrides: Overrides = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="Plan the recipe as `cpt train --lora` runs it.")
    ] = False,
    gpu: Gpu = None,
    gpus: Annotated[
        int | None, typer.Option(help="Number of GPUs on all machines together.", min=1)
    ] = None,
    nodes: Annotated[int, typer.Option(help="Number of machines.", min=1)] = 1,
    network_gbit: Annotated[
        float | None, typer.Option(help="Gbit/s of each machine's network.", min=0.1)
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option(help="GiB of memory of an unknown GPU.", min=0.1)
    ] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(help="Its dense peak in bf16, TFLOP/s.", min=0.1)
    ] = None,
    host_memory: Annotated[
        float | None, typer.Option(help="GiB of host memory per machine.", min=0.1)
    ] = None,
    mfu: Annotated[
        float | None, typer.Option(help="Share of the GPU's peak.", min=0.01, max=1)
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="A run to take the tokens per second from.")
    ] = None,
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(help="Adds the cost, in any currency.", min=0)
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Compare with a dry run of a whole step.")
    ] = False,
    write: Annotated[
        Path | None, typer.Option(help="Write the recipe that fits to this file.")
    ] = None,
    force: Force = False,
) -> None:
    """Estimate memory, time and cost of a run, and the cheapest change that makes it fit.

    Only the model's config is downloaded. Exit code 3 if the run does not fit, 0 if --write then wrote a recipe
    that does.

    Example: cpt plan recipe.yaml --gpu "RTX 4090" --gpus 1 --write fits.yaml
    """
    refuse_ignored({"--force": force and write is None}, "without --write")
    refuse_ignored({"--network-gbit": network_gbit is not None and nodes == 1}, "without --nodes")
    loaded, found = load_recipe(recipe, overrides or (), lora=lora), find_gpus()
    if (
        gpu is None
        and not found
        and gpus is None
        and not any(loaded.training.get(key) for key in ON_A_GPU)
    ):
        gpu = "cpu"
    name, number = named_gpus(gpu, gpus, nodes, found)
    known = {"memory": memory_gib, "peak_tflops": peak_tflops, "network_gbit": network_gbit}
    target = find_target(name, number, host_memory, **known)
    of_gpus = {"--memory-gib": memory_gib is not None, "--peak-tflops": peak_tflops is not None}
    refuse_ignored(of_gpus if target.on_cpu else {}, f"with {target.name}")
    limit = loaded.safety.max_gpu_memory
    share = target.usable_share(limit)
    planned = plan_recipe(loaded, target, number, nodes)
    setup, facts = planned.setup, planned.facts
    print_once(f"{format_setup(facts, setup, target)}\n")
    print_once("\n".join(format_plan(planned.memory, setup, target, share)))
    if limit is not None:
        effect = (
            "has no effect on a CPU" if target.on_cpu else f"leaves the run {limit:.0%} of each GPU"
        )
        print_once(f"  `safety.max_gpu_memory` {effect}.")
    if exact:
        print_once(compared(planned))
    mfu = mfu or assumed_mfu(setup)
    speed = (
        measured_speed(measured)
        if measured is not None
        else planned_speed(facts, setup, target, mfu)
    )
    print_once(f"\n{format_speed(speed, planned, target, price_per_gpu_hour)}")
    if setup.sampled and measured is None:
        print_once(
            "  Sampling and scoring completions are not included; use --measured RUN to include them."
        )
    needs = disk_needs(planned.recipe, facts, setup)
    checkpoints = (
        f"{needs.checkpoints_at_once} checkpoints of {format_bytes(needs.checkpoint)} at once"
    )
    print_once(
        f"Disk: {format_bytes(needs.total)}: {checkpoints}, and the model of {format_bytes(needs.export)}.\n"
    )
    where = f"{target.name} x {setup.gpus}"
    if fits(planned.memory, target, share):
        which = "a machine with" if nodes == 1 else f"{nodes} machines, each with"
        host = (
            f" in {which} {planned.memory.host.size / USABLE_OF_HOST / GIB:.0f} GiB of host memory"
        )
        print_once(f"Verdict: it fits {where}{'' if target.host_is_known else host}.")
        if write is not None:
            raise RecipeError(
                f"--write: the recipe fits without changes, so {write} was not written."
            )
        return
    print_once(f"Verdict: it does not fit {where}.")
    model = None
    with suppress(Exception):  # custom model code; `cpt check` reports its errors
        model = build_on_meta(planned.config)
    mistakes = setting_mistakes(loaded, model)

    def is_allowed(changes: Changes) -> bool:
        try:
            changed = load_recipe(recipe, words_of(overrides or (), changes), lora=lora)
        except RecipeError:
            return False
        return setting_mistakes(changed, model) <= mistakes

    proposal = cheapest_that_fits(
        setup, target, planned.count, mfu=mfu, share=share, is_allowed=is_allowed
    )
    if proposal is None:
        print_once(
            "No change of other keys makes it fit. Use a smaller model, shorter rows, or more GPUs."
        )
        raise typer.Exit(DOES_NOT_FIT)
    which = (
        "cheapest"
        if all(proposal.slower <= other.slower for other in proposal.others)
        else "nearest"
    )
    for one in (proposal, *proposal.others):
        print_once(f"{f'The {which}' if one is proposal else 'Another'} change that makes it fit:")
        print_once("\n".join(format_changes(one, target)))
    if write is None:
        raise typer.Exit(DOES_NOT_FIT)
    write_fitted(recipe, write, overrides or (), proposal.changes, lora=lora, force=force)
    print_once(f"Wrote {write}. Next: cpt check {write}")


def format_setup(facts: ModelSizes, setup: Setup, target: Target) -> str:
    trained = "all trained"
    if setup.lora is not None or facts.trained < facts.parameters:
        trained = f"{facts.trained / 1e6:,.0f}M of them trained{', in adapters' if setup.lora is not None else ''}"
    where = f"{setup.gpus} x {target.name}" + (
        f" in {setup.nodes} machines" if setup.nodes > 1 else ""
    )
    if target.on_cpu:
        where = f"{setup.gpus} process{'es' if setup.gpus > 1 else ''} on the CPU"
    sharding = "no ZeRO"
    if setup.zero is not None:
        parts = {
            "the optimizer": setup.zero.offload_optimizer,
            "the weights": setup.zero.offload_parameters,
        }
        on_host = " and ".join(part for part, there in parts.items() if there)
        sharding = "FSDP2" if setup.zero.is_fsdp else f"ZeRO-{setup.zero.stage}"
        sharding += f" with {on_host} on the host" if on_host else ""
    pairs = f" ({setup.micro_batch} pairs)" if setup.needs.sequences > 1 else ""
    at_once = f"{setup.sequences} x {setup.length:,} tokens per micro-batch{pairs}, {setup.tokens_per_step:,} per step"
    what = f"{facts.parameters / 1e9:.3g}B parameters ({facts.name}), {trained}"
    return f"{what}; {sharding}; {at_once}; {where}."


def format_plan(plan: MemoryPlan, setup: Setup, target: Target, share: float) -> Iterator[str]:
    usable = USABLE_OF_HOST if target.on_cpu else USABLE
    who, of = ("the machine", "all processes") if target.on_cpu else (target.name, "each GPU")
    yield table(f"Memory of {of}, at its peak ({plan.peak.name}):", plan.peak)
    yield format_room(who, target.memory_gib, usable * share, plan.peak.size)
    if not target.on_cpu:
        yield ""
        yield table(
            "Memory of the host:" if setup.nodes == 1 else "Memory of each machine's host:",
            plan.host,
        )
        if target.host_is_known:
            who = f"the host ({target.host_source})"
            yield format_room(who, target.host_memory_gib, USABLE_OF_HOST, plan.host.size)
        else:
            yield f"  Needs a host with {plan.host.size / USABLE_OF_HOST / GIB:.0f} GiB; set yours with --host-memory."
    if not plan.is_counted:
        yield "  The activations are estimated: this architecture's code cannot run without values."
    needs = setup.needs
    if needs.reference and setup.lora is None:
        yield "  An adapter (`model.lora`) needs no reference model; ZeRO-3 shards it over GPUs."
    if plan.peak.name == SAMPLING:
        fewer = "`training.steps_per_generation`, or shorter ones: `max_completion_length`"
        fewer = "`max_new_tokens`" if needs.stage == "gkd" else fewer
        yield f"  Sampling needs the most memory: {setup.sampled} completions at once. Lower {fewer}."
    if needs.uncounted:
        yield f"  Not counted: {'; '.join(needs.uncounted)}."


def table(title: str, moment: MemorySnapshot) -> str:
    rows = [
        f"  {term.name:<46}{term.size / GIB:>8.2f}  {term.note}".rstrip() for term in moment.terms
    ]
    return "\n".join((f"{title:<48}{'GiB':>8}", *rows, f"  {'sum':<46}{moment.size / GIB:>8.2f}"))


def format_room(who: str, memory: float, usable: float, size: float) -> str:
    room = usable * memory
    there = f"{room:.1f} GiB of {memory:.4g} that a run can use on {who}"
    if size / GIB > room:
        return f"  Does not fit: {size / GIB - room:.1f} GiB more than the {there}."
    return f"  Fits: {size / GIB / room:.0%} of the {there}."


def format_speed(speed: Speed, planned: "PlannedRun", target: Target, price: float | None) -> str:
    text = f"Speed: {speed.tokens_per_second:,.0f} tokens/s ({speed.source})"
    tokens = planned.recipe.budget.tokens
    if tokens is None:
        return f"{text}. The budget is in epochs: `cpt mixture` counts the tokens."
    hours = speed.hours(tokens)
    time = f"{hours / 24:.1f} days" if hours > 48 else f"{hours:.1f} hours"
    money = (
        ""
        if price is None
        else f", {hours * max(1, target.gpus) * price:,.0f} at {price:g} per GPU hour"
    )
    waits = f"\n  {speed.waits}." if speed.waits else ""
    return f"{text}: {time} for {tokens:,} tokens{money}, without evaluation and saving.{waits}"


def format_changes(proposal: FittingPlan, target: Target) -> Iterator[str]:
    for key, value in proposal.changes.items():
        yield f"  {key}: {in_yaml(value)}"
    host = "" if target.on_cpu else f", {proposal.plan.host.size / GIB:.0f} GiB on the host"
    size, time = (
        f"{proposal.plan.peak.size / GIB:.1f} GiB on each GPU{host}",
        f"{proposal.slower:.2f} times the time",
    )
    yield f"  Then {size}, about {time} that the unchanged recipe would take."
    if "model.dtype" in proposal.changes:
        yield "  Each update rounds the weights to bfloat16, without an fp32 copy; see docs/reference/training.md."
    if proposal.setup.releases:
        tokens = f"{proposal.setup.tokens_per_step:,}"
        yield f"  A step is one micro-batch of {tokens} tokens, and gradients are not clipped."


@dataclass(frozen=True)
class PlannedRun:
    recipe: Recipe
    """Replace each `auto` by a value."""
    config: PreTrainedConfig
    setup: Setup
    facts: ModelSizes
    activations: ActivationCounts
    memory: MemoryPlan

    def count(self, setup: Setup) -> tuple[ModelSizes, ActivationCounts]:
        return count_model(self.config, setup)


def plan_recipe(recipe: Recipe, target: Target, gpus: int, nodes: int) -> PlannedRun:
    """Count the model's parameters and add up its memory; `gpus` on all machines together. CptError if the recipe
    cannot run there, or the model's config cannot be read."""
    micro_batches_per_step(recipe, gpus)  # refuses processes that cannot divide the global batch
    if recipe.stage in REWARDED:
        check_generations(recipe, gpus)
    check_release(recipe, deepspeed=bool(recipe.training.get("deepspeed")), processes=gpus)
    if complaints := check_fsdp(recipe, here=False):
        raise RecipeError("\n".join(complaints))
    config = config_without_weights(recipe.model)
    recipe = with_chosen_values(recipe, config=config, target=target, processes=gpus, nodes=nodes)
    profile = (
        read_profile(recipe.training["deepspeed"]) if recipe.training.get("deepspeed") else None
    )
    attention = attention_on_gpu(recipe, config)
    setup = read_setup(
        recipe, gpus, profile, attention=attention, on_cpu=target.on_cpu, nodes=nodes
    )
    facts, activations = count_model(config, setup)
    workers, snapshot = (
        int(recipe.training.get("dataloader_num_workers", 0)),
        recipe.checkpoints.in_background,
    )
    plan = plan_memory(facts, setup, activations, workers=workers, snapshot=snapshot)
    return PlannedRun(recipe, config, setup, facts, activations, plan)


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


def compared(planned: PlannedRun) -> str:
    """Compare the plan with a dry run of one process, excluding buffers of engines, kernels and libraries."""
    config, setup, activations = planned.config, planned.setup, planned.activations
    if setup.needs.logits != WHOLE:
        raise RecipeError(
            f"--exact: stage `{setup.needs.stage}` has a loss that a dry run cannot run. Leave it out."
        )
    if setup.compiles:  # a dry run does not compile
        setup = replace(setup, compiles=False)
        activations = count_activations(config, setup)
    setup = setup.as_computed
    peak, alone = dry_run(config, setup), plan_memory(planned.facts, setup, activations).model_alone
    sizes = f"{peak / GIB:.2f} GiB for the model, by formula {alone / GIB:.2f} ({100 * alone / peak - 100:+.1f} %)"
    return f"  A dry run of a whole step, not compiled, takes {sizes}."


def write_fitted(
    recipe: Path,
    output: Path,
    overrides: Sequence[str],
    changes: Mapping[str, Any],
    *,
    lora: bool,
    force: bool,
) -> None:
    """Write a recipe with some keys changed: with the recipe as its `base` or, if that differs, in full."""
    if output.exists() and not force:
        raise RecipeError(
            f"{output} exists. Choose another name with --write, or overwrite it with --force."
        )
    whole = load_recipe(recipe, words_of(overrides, changes), lora=lora)
    tree: dict[str, Any] = {"base": os.path.relpath(recipe.resolve(), output.resolve().parent)}
    for key, value in changes.items():
        *above, last = key.split(".")
        section = tree
        for step in above:
            section = section.setdefault(step, {})
        section[last] = value
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(write_yaml(tree), encoding="utf-8")
    if overrides or lora or load_recipe(output) != whole:
        output.write_text(dump_recipe(whole), encoding="utf-8")


def words_of(overrides: Sequence[str], changes: Mapping[str, Any]) -> list[str]:
    """Return the overrides with the changes, as words on the command line."""
    return [*overrides, *(f"{key}={in_yaml(value)}" for key, value in changes.items())]
