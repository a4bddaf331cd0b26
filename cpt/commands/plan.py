"""`cpt plan RECIPE --gpu NAME`: estimate a run's memory, time and cost, and propose changes that make it fit."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cpt.command_line import Force, Gpu, Overrides, RecipePath, refuse_ignored
from cpt.distributed import print_once
from cpt.errors import RecipeError
from cpt.hardware import find_gpus
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.recipe.schema import Recipe
from cpt.recipe.values import in_yaml, write_yaml

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
    loaded = load_recipe(recipe, overrides or (), lora=lora)

    # Imported after the recipe is loaded: they import torch, which takes seconds.
    from cpt.planning.fitting import fits
    from cpt.planning.plan import (
        host_memory_needed_gib,
        plan_recipe,
        print_plan,
        print_proposals,
        propose_changes,
    )
    from cpt.planning.speed import assumed_mfu, find_target, named_gpus

    gpus_here = find_gpus()
    needs_gpu = any(map(loaded.training.get, ON_A_GPU))
    if gpu is None and gpus is None and not gpus_here and not needs_gpu:
        gpu = "cpu"
    name, num_gpus = named_gpus(gpu, gpus, nodes, gpus_here)
    target = find_target(
        name,
        num_gpus,
        host_memory,
        memory=memory_gib,
        peak_tflops=peak_tflops,
        network_gbit=network_gbit,
    )
    if target.on_cpu:
        of_gpus = {"--memory-gib": memory_gib is not None, "--peak-tflops": peak_tflops is not None}
        refuse_ignored(of_gpus, f"with {target.name}")
    planned = plan_recipe(loaded, target, num_gpus, nodes)
    setup = planned.setup
    mfu = mfu or assumed_mfu(setup)
    print_plan(
        planned,
        target,
        mfu=mfu,
        measured=measured,
        price=price_per_gpu_hour,
    )

    devices = f"{target.name} x {setup.gpus}"
    if fits(planned.memory, target, target.usable_share(loaded.safety.max_gpu_memory)):
        if not target.host_is_known:
            machines = "a machine with" if nodes == 1 else f"{nodes} machines, each with"
            needed_gib = host_memory_needed_gib(planned.memory)
            devices += f" in {machines} {needed_gib:.0f} GiB of host memory"
        print_once(f"Verdict: it fits {devices}.")
        if write is not None:
            raise RecipeError(
                f"--write: the recipe fits without changes, so {write} was not written."
            )
        return
    print_once(f"Verdict: it does not fit {devices}.")

    def load_changed(changes: Mapping[str, Any]) -> Recipe:
        return load_recipe(recipe, with_changes(overrides or (), changes), lora=lora)

    proposal = propose_changes(loaded, planned, target, mfu=mfu, load_changed=load_changed)
    if proposal is None:
        print_once(
            "No change of other keys makes it fit. Use a smaller model, shorter rows, or more GPUs."
        )
        raise typer.Exit(DOES_NOT_FIT)
    print_proposals(proposal, target)
    if write is None:
        raise typer.Exit(DOES_NOT_FIT)
    write_fitted(recipe, write, overrides or (), proposal.changes, lora=lora, force=force)
    print_once(f"Wrote {write}. Next: cpt check {write}")


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
    changed = load_recipe(recipe, with_changes(overrides, changes), lora=lora)
    tree: dict[str, Any] = {"base": os.path.relpath(recipe.resolve(), output.resolve().parent)}
    for key, value in changes.items():
        *above, last = key.split(".")
        section = tree
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(write_yaml(tree), encoding="utf-8")
    if overrides or lora or load_recipe(output) != changed:
        output.write_text(dump_recipe(changed), encoding="utf-8")


def with_changes(overrides: Sequence[str], changes: Mapping[str, Any]) -> list[str]:
    """Return the overrides with the changes, as words on the command line."""
    return [*overrides, *(f"{key}={in_yaml(value)}" for key, value in changes.items())]
