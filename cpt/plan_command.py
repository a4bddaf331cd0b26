"""`cpt plan`: does it fit, how long does it take, and what is the cheapest change where it does not fit?"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import PreTrainedConfig

from cpt.errors import RecipeError, ResourceError
from cpt.hardware import GIB, find_gpus
from cpt.models.config import config_from, load_config
from cpt.optim.released import check_release
from cpt.planner.activations import Counted, count_activations
from cpt.planner.advice import ACCUMULATION, Proposal, cheapest_that_fits, fits, host_that_is_needed
from cpt.planner.dry_run import dry_run
from cpt.planner.facts import ModelFacts
from cpt.planner.fitted import write_fitted
from cpt.planner.memory import MemoryPlan, plan_memory
from cpt.planner.page import told_plan, told_proposal, told_setup, told_speed, told_time_beside
from cpt.planner.setup import Setup, attention_on_gpu, setup_of
from cpt.planner.speed import ASSUMED_MFU, measured_speed, planned_speed
from cpt.planner.stage_terms import facts_for
from cpt.planner.stages import KINDS
from cpt.planner.target import find_target
from cpt.preflight.automatic import with_chosen_values
from cpt.preflight.disk import disk_needs
from cpt.ranks import tell
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Model, Recipe
from cpt.stages.deepspeed_profile import read_profile

DOES_NOT_FIT = 3  # the exit code: 2 is a mistake in the recipe


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="As `cpt train --lora` would run it.")] = False,
    gpu: Annotated[str | None, typer.Option(help='"RTX 4090", A100-80GB, H100, ...; or cpu. By default what is here.')] = None,
    gpus: Annotated[int | None, typer.Option(help="How many of them.", min=1)] = None,
    memory_gib: Annotated[float | None, typer.Option(help="Of each, where the table does not know it.", min=0.1)] = None,
    peak_tflops: Annotated[float | None, typer.Option(help="Likewise: its dense bf16 peak.", min=0.1)] = None,
    host_memory: Annotated[float | None, typer.Option(help="GiB of the machine's own memory.", min=0.1)] = None,
    max_memory: Annotated[float, typer.Option(help="Share of a GPU that the run may have.", min=0.05, max=1)] = 1.0,
    mfu: Annotated[float, typer.Option(help="Share of the GPU's peak that is reached.", min=0.01, max=1)] = ASSUMED_MFU,
    measured: Annotated[Path | None, typer.Option(help="A run whose measured tokens a second count instead.")] = None,
    price_per_gpu_hour: Annotated[float | None, typer.Option(help="For the cost in money, in any currency.", min=0)] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Run a whole step without memory beside, and compare.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write the recipe that fits to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
) -> None:
    """Memory, time and money of a run, before anything is downloaded."""
    loaded = load_recipe(recipe, overrides or (), lora=lora)
    name, number = gpu_that_is_meant(gpu, gpus)
    target = find_target(name, number, host_memory, memory=memory_gib, peak_tflops=peak_tflops)
    number_of_processes = gpus or max(1, target.gpus)
    check_release(loaded, deepspeed=bool(loaded.training.get("deepspeed")), processes=number_of_processes)
    config = config_without_weights(loaded.model)
    loaded = with_chosen_values(loaded, config=config, target=target, processes=number_of_processes, share=max_memory)
    profile = read_profile(loaded.training["deepspeed"]) if loaded.training.get("deepspeed") else None
    setup = setup_of(loaded, number_of_processes, profile, attention=attention_on_gpu(loaded, config), on_cpu=target.on_cpu)
    count = partial(look_at, config)
    facts, activations = count(setup)
    workers, snapshot = int(loaded.training.get("dataloader_num_workers", 0)), loaded.checkpoints.in_background
    plan = plan_memory(facts, setup, activations, workers=workers, snapshot=snapshot)
    tell(f"{told_setup(facts, setup, target)}\n")
    for line in told_plan(plan, setup, target, max_memory):
        tell(line)
    if exact:
        tell(compared(config, setup, facts, activations))
    tell("")
    speed = measured_speed(measured) if measured is not None else planned_speed(facts, setup, target, mfu)
    left_out = told_time_beside(setup, is_planned=measured is None)
    for line in (*told_speed(speed, loaded.budget.tokens, target, setup.gpus, price_per_gpu_hour), *left_out):
        tell(line)
    tell(f"{told_disk(loaded, facts, setup)}\n")
    if fits(plan, target, max_memory):
        tell(f"Verdict: it fits {target.name} x {setup.gpus}{'' if target.host_is_known else told_host(plan)}.")
        if write is not None:
            raise RecipeError(f"--write: the recipe fits as it is, so {write} was not written.")
        return
    tell(f"Verdict: it does not fit {target.name} x {setup.gpus}.")
    proposal = cheapest_that_fits(setup, target, count, mfu=mfu, share=max_memory)
    if proposal is not None:
        proposal = without_what_follows(proposal, loaded)
        for line in told_proposal(proposal, target):
            tell(line)
        if write is not None:
            write_fitted(recipe, write, overrides or (), proposal.changes, lora=lora, force=force)
            tell(f"{write} is written. Next: cpt check {write}")
            return
    else:
        tell("Nothing that keeps this model and these rows fits. Take a smaller model, shorter rows, more GPUs or larger ones.")
    raise typer.Exit(DOES_NOT_FIT)


def gpu_that_is_meant(gpu: str | None, gpus: int | None) -> tuple[str, int]:
    """The one that was named, or those of this machine.

    Raises:
        ResourceError: none was named, and there is none.
    """
    found = find_gpus()
    if gpu is None and not found:
        raise ResourceError('this machine has no GPU: say which one is meant, --gpu "RTX 4090", or --gpu cpu.')
    return (gpu, gpus or 1) if gpu is not None else (found[0].name, gpus or len(found))


def told_host(plan: MemoryPlan) -> str:
    """What the verdict depends on, where nobody said what the host has."""
    return f" in a machine with {host_that_is_needed(plan):.0f} GiB of its own memory"


def look_at(config: PreTrainedConfig, setup: Setup) -> tuple[ModelFacts, Counted]:
    """What the planner needs of a model."""
    return facts_for(config, setup), count_activations(config, setup)


def config_without_weights(model: Model) -> PreTrainedConfig:
    """The architecture, from the recipe where the Hub cannot be asked.

    Raises:
        ResourceError: the Hub cannot be reached, and the recipe does not say the shape.
    """
    try:
        return load_config(model)
    except ResourceError as problem:
        if model.config is None:
            raise ResourceError(f"{problem} Or write the model's shape as `model.config`: recipes/models has some.") from problem
        return config_from(model.config)


def compared(config: PreTrainedConfig, setup: Setup, facts: ModelFacts, activations: Counted) -> str:
    """Formula and dry run, of what both know: weights, gradients, optimizer, activations and logits of one process.

    Raises:
        RecipeError: the stage has another loss than a language model's own.
    """
    if setup.beside.stage in KINDS:
        raise RecipeError(f"--exact: a dry run is of a language model's own loss; stage `{setup.beside.stage}` has another. Leave it out.")
    run = dry_run(config, setup)
    alone = plan_memory(facts, setup, activations).model_alone
    difference = f"{alone / run.peak - 1:+.1%}".replace("%", " %")
    return f"  A dry run of a whole step takes {run.peak / GIB:.2f} GiB for the model, the formula says {alone / GIB:.2f} ({difference})."


def told_disk(recipe: Recipe, facts: ModelFacts, setup: Setup) -> str:
    """What checkpoints take."""
    needs = disk_needs(recipe, facts.parameters, with_master_weights=setup.zero is not None)
    each = f"{needs.checkpoints_at_once} checkpoints of {needs.checkpoint / GIB:.1f} GiB at once, and the model of {needs.export / GIB:.1f}"
    return f"Disk: {needs.total / GIB:,.0f} GiB: {each}."


def without_what_follows(proposal: Proposal, recipe: Recipe) -> Proposal:
    """Accumulation is not written where the global batch decides it."""
    changes: dict[str, Any] = dict(proposal.changes)
    if recipe.budget.global_batch_tokens is not None:
        changes.pop(ACCUMULATION, None)
    return Proposal(proposal.setup, proposal.plan, changes, proposal.slower)
