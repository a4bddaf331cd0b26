"""`cpt prepare RECIPE`: read, filter, tokenise and pack a recipe's documents ahead of time, so that the run begins at
once.

Over many machines that share the store's folder, each is given a share: `--share 3/16`. Each shard of a source is made
by one of them, those of a worker that died by whoever comes by; the last one puts all together, or `cpt prepare
RECIPE` does it afterwards.
"""

import time
from pathlib import Path
from typing import Annotated

import typer

from cpt.command_line import show_log
from cpt.data.prepared import PreparedData
from cpt.errors import RecipeError
from cpt.prepare.on_ray import prepare_on_ray
from cpt.prepare.shares import share_of
from cpt.prepare.whole import prepare_recipe, prepare_share
from cpt.recipe.load import load_recipe

Share = Annotated[
    str | None,
    typer.Option(
        "--share",
        help="The part of this worker among many that share the store: 3/16, or `array` in a SLURM array job.",
    ),
]


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")] = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="The store's folder; by default $CPT_CACHE or ~/.cache/cpt.")
    ] = None,
    share: Share = None,
    ray: Annotated[bool, typer.Option("--ray", help="Spread the work over a Ray cluster.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="With ray: workers, a core each; by default all cores of the cluster.")
    ] = None,
) -> None:
    """Fill the store; what is there already is not made again, and what was killed goes on where it was.

    What is there already is not made again; what was killed goes on where it was.

    Example: cpt prepare recipe.yaml --share 3/16
    """
    show_log()
    start = time.monotonic()
    loaded = load_recipe(recipe, overrides or ())
    if workers is not None and not ray:
        raise RecipeError("--workers is of Ray: add --ray. Without it, CPT_WORKERS says how many processes tokenise.")
    if share is not None and ray:
        raise RecipeError("--share and --ray both share the work out. Leave one of the two out.")
    if ray:
        prepare_on_ray(loaded, cache, workers)
    if share is not None:
        done = prepare_share(loaded, share_of(share), cache)
        typer.echo(
            f"Made {done.shards:,} of {done.all_shards:,} shards as worker {share_of(share)}"
            f" ({time.monotonic() - start:.1f} s)."
        )
        if done.missing:
            typer.echo(
                f"Others are at the last {done.missing:,}. The last worker puts all together; if none does: cpt"
                f" prepare {recipe}"
            )
            return
    prepared = prepare_recipe(loaded, cache)
    tell(prepared, time.monotonic() - start)


def tell(prepared: PreparedData, seconds: float) -> None:
    """Say what is ready."""
    if began := [source.name for source in prepared.sources if source.is_estimate]:
        typer.echo(
            f"Of {', '.join(began)} only what a run begins with, for `data.disk_bytes` bounds the store"
            f" ({seconds:.1f} s)."
        )
    else:
        documents = sum(source.documents for source in prepared.sources)
        typer.echo(f"{prepared.num_tokens:,} tokens of {documents:,} documents are ready ({seconds:.1f} s).")
