"""`cpt prepare RECIPE`: tokenise and pack a recipe's documents ahead of its run, on one machine or on many."""

import re
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from cpt.command_line import show_log
from cpt.data.prepared import PreparedData
from cpt.data_commands.prepare import prepare_on_ray, prepare_recipe, prepare_shard
from cpt.errors import RecipeError
from cpt.recipe.load import load_recipe


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")] = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="The store's folder; by default $CPT_CACHE or ~/.cache/cpt.")
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option("--shard", help="Only part I of N, such as 3/16. All parts share one store."),
    ] = None,
    cluster: Annotated[
        Literal["ray"] | None, typer.Option("--with", help="ray: make each shard as a task of a Ray cluster.")
    ] = None,
) -> None:
    """Read, filter, tokenise and pack a recipe's documents ahead of its run.

    What is there is not made again, so a command that was killed can be repeated.

    Example: cpt prepare recipe.yaml --shard 3/16
    """
    show_log()
    start = time.monotonic()
    loaded = load_recipe(recipe, overrides or ())
    if shard is not None and cluster is not None:
        raise RecipeError("--shard and --with ray both divide the work. Remove one of the two.")
    if cluster is not None:
        typer.echo(f"{prepare_on_ray(loaded, cache):,} shards made by Ray ({time.monotonic() - start:.1f} s).")
    if shard is not None:
        count, missing = prepare_shard(loaded, *part_of(shard), cache)
        typer.echo(f"{count:,} shards made for part {shard} ({time.monotonic() - start:.1f} s).")
        if missing:
            typer.echo(f"{missing:,} shards of other parts are missing. When all are made: cpt prepare {recipe}")
            return
    report(prepare_recipe(loaded, cache), time.monotonic() - start)


def part_of(words: str) -> tuple[int, int]:
    """Part and number of parts of `3/16`."""
    found = re.fullmatch(r"(\d+)/(\d+)", words)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise RecipeError(f"--shard: expected I/N with I from 1 to N, such as 3/16, got `{words}`.")
    return int(found[1]), int(found[2])


def report(prepared: PreparedData, seconds: float) -> None:
    if partial := [source.name for source in prepared.sources if source.is_estimate]:
        typer.echo(
            f"Ready: the beginning of {', '.join(partial)}; `data.disk_bytes` bounds the store ({seconds:.1f} s)."
        )
    else:
        documents = sum(source.documents for source in prepared.sources)
        typer.echo(f"{prepared.num_tokens:,} tokens of {documents:,} documents are ready ({seconds:.1f} s).")
