"""`cpt plan`: does it fit, how long does it take, and what is the cheapest change where it does not fit?"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import PreTrainedConfig

from cpt.command_line import refuse_ignored
from cpt.errors import RecipeError, ResourceError
from cpt.hardware import GIB, find_gpus
from cpt.models.config import config_from, load_config
from cpt.optim.released import check_release
from cpt.planner.activations import Counted, count_activations
from cpt.planner.advice import Proposal, cheapest_that_fits, fits, host_that_is_needed
from cpt.planner.dry_run import dry_run
from cpt.planner.efficiency import better_ways, speed_of_one_machine
from cpt.planner.facts import ModelFacts
from cpt.planner.fitted import write_fitted
from cpt.planner.host import checkpoint_bytes
from cpt.planner.machines import Machines, machines_that_are_meant, refuse_too_many
from cpt.planner.memory import MemoryPlan, plan_memory
from cpt.planner.page import told_plan, told_proposal, told_setup, told_speed, told_time_beside
from cpt.planner.page_of_nodes import Saved, told_communication, told_saving, told_ways
from cpt.planner.saving_interval import STORAGE, saving_of
from cpt.planner.setup import Setup, attention_on_gpu, setup_of
from cpt.planner.speed import ASSUMED_MFU, ASSUMED_MFU_NOT_COMPILED, Speed, assumed_mfu, measured_speed, planned_speed
from cpt.planner.stage_terms import facts_for
from cpt.planner.stages import KINDS
from cpt.planner.target import Target, find_target
from cpt.preflight.automatic import with_chosen_values
from cpt.preflight.disk import DiskNeeds, disk_needs
from cpt.ranks import tell
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Model, Recipe
from cpt.stages.deepspeed_profile import read_profile
from cpt.stages.fsdp_profile import refuse_for_any_machine

log = logging.getLogger("cpt")

BY_DEFAULT = f" By default {ASSUMED_MFU} with compiled layers, {ASSUMED_MFU_NOT_COMPILED} without."
DOES_NOT_FIT = 3  # the exit code: 2 is a mistake in the recipe


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="As `cpt train --lora` would run it.")] = False,
    gpu: Annotated[
        str | None, typer.Option(help='"RTX 4090", A100-80GB, H100, ...; or cpu. By default what is here.')
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="How many of them, on all machines together.", min=1)] = None,
    nodes: Annotated[int, typer.Option(help="How many machines.", min=1)] = 1,
    gpus_per_node: Annotated[int | None, typer.Option(help="How many GPUs each of them has.", min=1)] = None,
    links: Annotated[
        str | None, typer.Option(help='What connects them: "nvlink4, 8 x infiniband400", "ethernet10", ...')
    ] = None,
    storage_gbps: Annotated[
        float | None, typer.Option(help="GB a second that a machine writes checkpoints with.", min=0.001)
    ] = None,
    hours_between_failures: Annotated[
        float | None, typer.Option(help="Of the whole job, where you know them.", min=0.01)
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option(help="GiB of each GPU, where its name is unknown.", min=0.1)
    ] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(help="Its dense bf16 peak in TFLOP/s, likewise.", min=0.1)
    ] = None,
    host_memory: Annotated[float | None, typer.Option(help="GiB of the machine's own memory.", min=0.1)] = None,
    max_memory: Annotated[float, typer.Option(help="Share of a GPU that the run may have.", min=0.05, max=1)] = 1.0,
    mfu: Annotated[
        float | None, typer.Option(help=f"Share of the GPU's peak that is reached.{BY_DEFAULT}", min=0.01, max=1)
    ] = None,
    measured: Annotated[Path | None, typer.Option(help="A run whose measured tokens a second count instead.")] = None,
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(help="Of one GPU, in any currency: adds the cost.", min=0)
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Run a whole step without memory beside, and compare.")
    ] = False,
    write: Annotated[Path | None, typer.Option(help="Write the recipe that fits to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
) -> None:
    """Memory, time and money of a run, before anything is downloaded.

    Nothing is downloaded but the model's config. Exit code 3 where the run does not fit.

    Example: cpt plan recipe.yaml --gpu "RTX 4090" --gpus 1 --write fits.yaml
    """
    refuse_ignored({"--force": force and write is None}, "without --write")
    loaded = load_recipe(recipe, overrides or (), lora=lora)
    found = find_gpus()
    if gpu is None and not found and gpus is None and gpus_per_node is None and nodes == 1 and trains_on_cpu(loaded):
        gpu = "cpu"
    machines = machines_that_are_meant(gpu, gpus, nodes, gpus_per_node, found, links)
    figures: dict[str, Any] = {"memory": memory_gib, "peak_tflops": peak_tflops, "nodes": nodes, "links": links}
    target = find_target(machines.gpu, machines.gpus, host_memory, **figures)
    of_gpus = {"--memory-gib": memory_gib is not None, "--peak-tflops": peak_tflops is not None}
    refuse_ignored(
        of_gpus if target.on_cpu else {"--links": links is not None and machines.gpus == 1}, f"with 1 x {target.name}"
    )
    planned = planned_run(loaded, machines, target, max_memory)
    setup, facts = planned.setup, planned.facts
    tell(f"{told_setup(facts, setup, target)}\n")
    tell_all(told_plan(planned.memory, setup, target, max_memory))
    if exact:
        tell(compared(planned.config, setup, facts, planned.activations))
    tell("")
    mfu = mfu or assumed_mfu(setup)
    own = planned_speed(facts, setup, target, mfu)
    speed = measured_speed(measured, setup.tokens_per_step) if measured is not None else own
    left_out = told_time_beside(setup, is_planned=measured is None)
    tell_all((*told_speed(speed, planned.recipe.budget.tokens, target, setup.gpus, price_per_gpu_hour), *left_out))
    with_master = setup.zero is not None and not setup.zero.is_fsdp
    needs = disk_needs(planned.recipe, facts.parameters, with_master_weights=with_master, on_gpu=not setup.on_cpu)
    tell(told_disk(needs))
    tell_all(told_several(planned, own, mfu, max_memory))
    if setup.nodes > 1 or storage_gbps is not None or hours_between_failures is not None:
        tell_all(told_saves(planned, speed, needs.checkpoint, storage_gbps, hours_between_failures))
    tell("")
    where = f"{target.name} x {setup.gpus}"
    if fits(planned.memory, target, max_memory):
        tell(f"Verdict: it fits {where}{'' if target.host_is_known else told_host(planned.memory, setup)}.")
        if write is not None:
            raise RecipeError(f"--write: the recipe fits as it is, so {write} was not written.")
        return
    tell(f"Verdict: it does not fit {where}.")
    proposal = cheapest_that_fits(setup, target, planned.count, mfu=mfu, share=max_memory)
    tell_what_would_fit(
        proposal,
        planned,
        partial(write_fitted, recipe, write, overrides or (), lora=lora, force=force) if write else None,
    )


def trains_on_cpu(recipe: Recipe) -> bool:
    """Whether a recipe asks for nothing that only a GPU does, as one of `cpt init --gpu cpu`."""
    return not any(recipe.training.get(key) for key in ("bf16", "fp16", "tf32", "deepspeed", "fsdp"))


def tell_all(lines: Iterable[str]) -> None:
    """One after the other."""
    for line in lines:
        tell(line)


@dataclass(frozen=True)
class Planned:
    """A recipe on machines, counted."""

    recipe: Recipe
    config: PreTrainedConfig
    target: Target
    setup: Setup
    facts: ModelFacts
    activations: Counted
    memory: MemoryPlan

    def count(self, setup: Setup) -> tuple[ModelFacts, Counted]:
        """Of the model in another setup."""
        return facts_for(self.config, setup), count_activations(self.config, setup)


def planned_run(recipe: Recipe, machines: Machines, target: Target, share: float) -> Planned:
    """Everything that needs the model's shape.

    Raises:
        CptError: the recipe cannot run there, or its model's config cannot be had.
    """
    refuse_too_many(recipe, machines)
    check_release(recipe, deepspeed=bool(recipe.training.get("deepspeed")), processes=machines.gpus)
    refuse_for_any_machine(recipe)
    config = config_without_weights(recipe.model)
    recipe = with_chosen_values(
        recipe, config=config, target=target, processes=machines.gpus, nodes=machines.nodes, share=share
    )
    profile = read_profile(recipe.training["deepspeed"]) if recipe.training.get("deepspeed") else None
    attention = attention_on_gpu(recipe, config)
    setup = setup_of(recipe, machines.gpus, profile, attention=attention, on_cpu=target.on_cpu, nodes=machines.nodes)
    facts, activations = facts_for(config, setup), count_activations(config, setup)
    workers, snapshot = int(recipe.training.get("dataloader_num_workers", 0)), recipe.checkpoints.in_background
    plan = plan_memory(facts, setup, activations, workers=workers, snapshot=snapshot)
    return Planned(recipe, config, target, setup, facts, activations, plan)


def told_several(planned: Planned, own: Speed, mfu: float, share: float) -> Iterator[str]:
    """What goes between several machines, and what would suit their links better; nothing of one."""
    setup, links = planned.setup, planned.target.links
    if setup.nodes == 1 or links is None:
        return
    yield ""
    yield from told_communication(own, setup, links)
    ways = better_ways(setup, own, planned.target, planned.count, mfu=mfu, share=share)
    alone = speed_of_one_machine(setup, planned.target, planned.count, mfu=mfu, share=share)
    yield from told_ways(ways, own, alone, setup, links)


def told_saves(
    planned: Planned, speed: Speed, checkpoint: float, storage_gbps: float | None, hours: float | None
) -> Iterator[str]:
    """Saves and failures."""
    setup, section, tokens = planned.setup, planned.recipe.checkpoints, planned.recipe.budget.tokens
    checkpoint, in_background = (
        checkpoint or checkpoint_bytes(planned.facts, setup),
        section.in_background,
    )  # 0: of adapters alone
    writers, gigabytes = setup.nodes if setup.zero is not None else 1, storage_gbps or STORAGE
    saving = saving_of(
        checkpoint,
        gpus=setup.gpus,
        writers=writers,
        gigabytes=gigabytes,
        in_background=in_background,
        hours_between_failures=hours,
    )
    steps_of_run = math.inf if tokens is None else tokens / setup.tokens_per_step
    every, in_tokens = None if section.every_steps is None else int(section.every_steps), None
    if section.every_tokens is not None:
        every, in_tokens = max(1, round(section.every_tokens / setup.tokens_per_step)), setup.tokens_per_step
    elif section.every_steps is not None and section.every_steps < 1:
        if tokens is None:
            yield f"Saving: each {section.every_steps:.1%} of the run, whose length `cpt mixture` counts."
            return
        every = math.ceil(section.every_steps * steps_of_run)
    who = (
        f"{writers} machines at {gigabytes:g} GB a second each"
        if writers > 1
        else f"one machine at {gigabytes:g} GB a second"
    )
    storage = who if storage_gbps is not None else f"{who}, assumed; --storage-gbps says yours"
    yield from told_saving(checkpoint, saving, speed, Saved(every, in_background, in_tokens, steps_of_run), storage)


def tell_what_would_fit(
    proposal: Proposal | None, planned: Planned, write: Callable[[Mapping[str, Any]], Path] | None
) -> None:
    """The remedy, written where that was asked for.

    Raises:
        Exit: with the code of what does not fit, where nothing was written.
    """
    if proposal is None:
        tell(
            "Nothing that keeps this model and these rows fits. Take a smaller model, shorter rows, more GPUs or"
            " larger ones."
        )
        raise typer.Exit(DOES_NOT_FIT)
    for line in told_proposal(proposal, planned.target):
        tell(line)
    if write is None:
        raise typer.Exit(DOES_NOT_FIT)
    written = write(proposal.changes)
    tell(f"{written} is written. Next: cpt check {written}")


def told_host(plan: MemoryPlan, setup: Setup) -> str:
    """What the verdict depends on, where nobody said what the host has."""
    which = "a machine with" if setup.nodes == 1 else f"{setup.nodes} machines, each with"
    return f" in {which} {host_that_is_needed(plan):.0f} GiB of its own memory"


def config_without_weights(model: Model) -> PreTrainedConfig:
    """The architecture, from the recipe where the Hub cannot be asked.

    Raises:
        ResourceError: the Hub cannot be reached, and the recipe does not say the shape.
    """
    try:
        return load_config(model)
    except ResourceError as problem:
        if model.config is None:
            raise ResourceError(
                f"{problem} Or write the model's shape as `model.config`: recipes/models has some."
            ) from problem
        log.warning(
            f"model.path: {model.path} cannot be read here. The plan is for the shape in `model.config`, which was not"
            " compared."
        )
        return config_from(model.config)


def compared(config: PreTrainedConfig, setup: Setup, facts: ModelFacts, activations: Counted) -> str:
    """Formula and dry run, of what both know: weights, gradients, optimizer, activations and logits of one process,
    not compiled.

    Raises:
        RecipeError: the stage has another loss than a language model's own.
    """
    if setup.beside.stage in KINDS:
        raise RecipeError(
            f"--exact: a dry run is of a language model's own loss; stage `{setup.beside.stage}` has another. Leave it"
            " out."
        )
    if setup.compiles:  # a dry run is of layers that are not
        setup = replace(setup, compiles=False)
        activations = count_activations(config, setup)
    setup = setup.as_computed
    run = dry_run(config, setup)
    alone = plan_memory(facts, setup, activations).model_alone
    difference = f"{alone / run.peak - 1:+.1%}".replace("%", " %")
    sizes = f"{run.peak / GIB:.2f} GiB for the model, the formula says {alone / GIB:.2f} ({difference})"
    sizes = f"{run.peak / GIB:.2f} GiB for the model, the formula says {alone / GIB:.2f} ({difference})"
    return f"  A dry run of a whole step, not compiled, takes {sizes}."


def told_disk(needs: DiskNeeds) -> str:
    """What checkpoints take."""
    each = (
        f"{needs.checkpoints_at_once} checkpoints of {needs.checkpoint / GIB:.1f} GiB at once, and the model of"
        f" {needs.export / GIB:.1f}"
    )
    return f"Disk: {needs.total / GIB:,.0f} GiB: {each}."
