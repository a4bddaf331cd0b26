"""`cpt plan RECIPE --gpu NAME`: does it fit, how long does it take, what does it cost, and what would make it fit."""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import PreTrainedConfig

from cpt.command_line import refuse_ignored
from cpt.errors import RecipeError, ResourceError
from cpt.hardware import GIB, find_gpus
from cpt.models.config import config_from, load_config
from cpt.optim.released import check_release
from cpt.planning.activations import Counted, count_activations
from cpt.planning.advice import cheapest_that_fits, fits, host_that_is_needed
from cpt.planning.automatic import with_chosen_values
from cpt.planning.check_resources import disk_needs
from cpt.planning.dry_run import dry_run
from cpt.planning.facts import ModelFacts
from cpt.planning.memory import MemoryPlan, facts_for, plan_memory
from cpt.planning.page import format_plan, format_proposal, format_setup, format_speed
from cpt.planning.setup import Setup, attention_on_gpu, setup_of
from cpt.planning.speed import ASSUMED_MFU, ASSUMED_MFU_NOT_COMPILED, assumed_mfu, measured_speed, planned_speed
from cpt.planning.stage_terms import KINDS
from cpt.planning.target import Target, find_target, named_gpus, refuse_too_many
from cpt.ranks import tell
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.recipe.schema import Model, Recipe
from cpt.recipe.values import in_yaml, write_yaml
from cpt.training.deepspeed_profile import read_profile
from cpt.training.fsdp_profile import refuse_for_any_machine

log = logging.getLogger("cpt")

BY_DEFAULT = f" By default {ASSUMED_MFU} with compiled layers, {ASSUMED_MFU_NOT_COMPILED} without."
DOES_NOT_FIT = 3  # the exit code: 2 is a mistake in the recipe
ON_A_GPU = ("bf16", "fp16", "tf32", "deepspeed", "fsdp")


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="As `cpt train --lora` would run it.")] = False,
    gpu: Annotated[
        str | None, typer.Option(help='"RTX 4090", A100-80GB, H100, ...; or cpu. By default what is here.')
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="How many of them, on all machines together.", min=1)] = None,
    nodes: Annotated[int, typer.Option(help="How many machines.", min=1)] = 1,
    network_gbit: Annotated[
        float | None, typer.Option(help="Gbit/s of each machine's network, all adapters together.", min=0.1)
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option(help="GiB of each GPU, for one that is unknown.", min=0.1)
    ] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(help="Its dense bf16 peak in TFLOP/s, for a GPU that is unknown.", min=0.1)
    ] = None,
    host_memory: Annotated[float | None, typer.Option(help="GiB of the machine's own memory.", min=0.1)] = None,
    max_memory: Annotated[float, typer.Option(help="Share of a GPU that the run may have.", min=0.05, max=1)] = 1.0,
    mfu: Annotated[
        float | None, typer.Option(help=f"Share of the GPU's peak that is reached.{BY_DEFAULT}", min=0.01, max=1)
    ] = None,
    measured: Annotated[Path | None, typer.Option(help="Take the tokens a second of this run instead.")] = None,
    price_per_gpu_hour: Annotated[float | None, typer.Option(help="In any currency: adds the cost.", min=0)] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Compare with a dry run of a whole step.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write the recipe that fits to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
) -> None:
    """Plan memory, time and money of a run, and the cheapest change that makes it fit.

    Nothing is downloaded but the model's config. Exit code 3 if the run does not fit, 0 if --write then wrote
    a recipe that does.

    Example: cpt plan recipe.yaml --gpu "RTX 4090" --gpus 1 --write fits.yaml
    """
    refuse_ignored({"--force": force and write is None}, "without --write")
    refuse_ignored({"--network-gbit": network_gbit is not None and nodes == 1}, "without --nodes")
    loaded, found = load_recipe(recipe, overrides or (), lora=lora), find_gpus()
    if gpu is None and not found and gpus is None and not any(loaded.training.get(key) for key in ON_A_GPU):
        gpu = "cpu"
    name, number = named_gpus(gpu, gpus, nodes, found)
    target = find_target(
        name, number, host_memory, memory=memory_gib, peak_tflops=peak_tflops, network_gbit=network_gbit
    )
    of_gpus = {"--memory-gib": memory_gib is not None, "--peak-tflops": peak_tflops is not None}
    refuse_ignored(of_gpus if target.on_cpu else {}, f"with {target.name}")
    planned = plan_recipe(loaded, target, number, nodes, max_memory)
    setup, facts = planned.setup, planned.facts
    tell(f"{format_setup(facts, setup, target)}\n")
    tell_all(format_plan(planned.memory, setup, target, max_memory))
    if exact:
        tell(compared(planned))
    tell("")
    mfu = mfu or assumed_mfu(setup)
    speed = measured_speed(measured) if measured is not None else planned_speed(facts, setup, target, mfu)
    tokens, is_measured = planned.recipe.budget.tokens, measured is not None
    tell_all(format_speed(speed, tokens, target, setup, price_per_gpu_hour, is_measured=is_measured))
    needs = disk_needs(planned.recipe, facts, setup)
    checkpoints = f"{needs.checkpoints_at_once} checkpoints of {needs.checkpoint / GIB:.1f} GiB at once"
    tell(f"Disk: {needs.total / GIB:,.0f} GiB: {checkpoints}, and the model of {needs.export / GIB:.1f}.\n")
    where = f"{target.name} x {setup.gpus}"
    if fits(planned.memory, target, max_memory):
        which = "a machine with" if nodes == 1 else f"{nodes} machines, each with"
        host = f" in {which} {host_that_is_needed(planned.memory):.0f} GiB of its own memory"
        tell(f"Verdict: it fits {where}{'' if target.host_is_known else host}.")
        if write is not None:
            raise RecipeError(f"--write: the recipe fits as it is, so {write} was not written.")
        return
    tell(f"Verdict: it does not fit {where}.")
    proposal = cheapest_that_fits(setup, target, planned.count, mfu=mfu, share=max_memory)
    if proposal is None:
        tell("No change keeps this model and these rows and fits. Use a smaller model, shorter rows, or more GPUs.")
        raise typer.Exit(DOES_NOT_FIT)
    tell_all(format_proposal(proposal, target))
    if write is None:
        raise typer.Exit(DOES_NOT_FIT)
    write_fitted(recipe, write, overrides or (), proposal.changes, lora=lora, force=force)
    tell(f"{write} is written. Next: cpt check {write}")


def tell_all(lines: Iterable[str]) -> None:
    for line in lines:
        tell(line)


@dataclass(frozen=True)
class Planned:
    recipe: Recipe
    """With values in place of `auto`."""
    config: PreTrainedConfig
    setup: Setup
    facts: ModelFacts
    activations: Counted
    memory: MemoryPlan

    def count(self, setup: Setup) -> tuple[ModelFacts, Counted]:
        return facts_for(self.config, setup), count_activations(self.config, setup)


def plan_recipe(recipe: Recipe, target: Target, gpus: int, nodes: int, share: float) -> Planned:
    """Count the model, and add up its memory.

    Args:
        gpus: processes on all machines together.
        share: of a GPU's memory that the run may have.

    Raises:
        CptError: the recipe cannot run there, or the model's config cannot be read.
    """
    refuse_too_many(recipe, gpus)
    check_release(recipe, deepspeed=bool(recipe.training.get("deepspeed")), processes=gpus)
    refuse_for_any_machine(recipe)
    config = config_without_weights(recipe.model)
    recipe = with_chosen_values(recipe, config=config, target=target, processes=gpus, nodes=nodes, share=share)
    profile = read_profile(recipe.training["deepspeed"]) if recipe.training.get("deepspeed") else None
    attention = attention_on_gpu(recipe, config)
    setup = setup_of(recipe, gpus, profile, attention=attention, on_cpu=target.on_cpu, nodes=nodes)
    facts, activations = facts_for(config, setup), count_activations(config, setup)
    workers, snapshot = int(recipe.training.get("dataloader_num_workers", 0)), recipe.checkpoints.in_background
    plan = plan_memory(facts, setup, activations, workers=workers, snapshot=snapshot)
    return Planned(recipe, config, setup, facts, activations, plan)


def config_without_weights(model: Model) -> PreTrainedConfig:
    """The architecture, from the recipe if the Hub cannot be reached.

    Raises:
        ResourceError: the Hub cannot be reached, and the recipe has no shape.
    """
    try:
        return load_config(model)
    except ResourceError as problem:
        if model.config is None:
            raise ResourceError(
                f"{problem} Or write the shape as `model.config`: recipes/models has some."
            ) from problem
        log.warning(
            f"model.path: {model.path} cannot be read here. The plan is for `model.config`, not compared with it."
        )
        return config_from(model.config)


def compared(planned: Planned) -> str:
    """Compare the plan with a dry run of one process, without buffers of engines, kernels and libraries.

    Raises:
        RecipeError: the stage has another loss than a language model's own.
    """
    config, setup, activations = planned.config, planned.setup, planned.activations
    if setup.beside.stage in KINDS:
        raise RecipeError(
            f"--exact: stage `{setup.beside.stage}` has a loss that a dry run cannot make. Leave it out."
        )
    if setup.compiles:  # a dry run does not compile
        setup = replace(setup, compiles=False)
        activations = count_activations(config, setup)
    setup = setup.as_computed
    peak, alone = dry_run(config, setup).peak, plan_memory(planned.facts, setup, activations).model_alone
    difference = f"{alone / peak - 1:+.1%}".replace("%", " %")
    sizes = f"{peak / GIB:.2f} GiB for the model, the formula says {alone / GIB:.2f} ({difference})"
    return f"  A dry run of a whole step, not compiled, takes {sizes}."


def write_fitted(
    recipe: Path,
    output: Path,
    overrides: Sequence[str],
    changes: Mapping[str, Any],
    *,
    lora: bool = False,
    force: bool = False,
) -> None:
    """Write a recipe with a few keys changed: on the recipe as its `base`, or whole where that gives another one.

    Args:
        changes: key with dots -> value.

    Raises:
        RecipeError: the output exists, or the changed recipe has mistakes.
    """
    if output.exists() and not force:
        raise RecipeError(f"{output} exists. Choose another name with --write, or write over it with --force.")
    words = [*overrides, *(f"{key}={in_yaml(value)}" for key, value in changes.items())]
    whole = load_recipe(recipe, words, lora=lora)
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
