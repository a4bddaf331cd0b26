"""`cpt prepare RECIPE`: read, filter, tokenise and pack a recipe's documents ahead of time, so that the run begins at once."""

import time
from pathlib import Path
from typing import Annotated

import typer

from cpt.command_line import show_log
from cpt.data.build import build_data
from cpt.data.form_of_stage import form_of_stage
from cpt.data.prepared import PreparedData
from cpt.optim.schedules import phases_in_tokens
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe
from cpt.tokenizer.load import load_tokenizer


def prepare_recipe(recipe: Recipe, cache_dir: Path | None = None) -> PreparedData:
    """Fill the store with all that the recipe's run will read; where the disk is bounded, with what it begins with."""
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    return build_data(
        phases_in_tokens(recipe),
        tokenizer,
        seed=recipe.seed,
        evaluation=recipe.evaluation,
        form=form_of_stage(recipe.stage),
        budget=recipe.budget,
        cache_dir=cache_dir,
        whole=recipe.data.disk_bytes is None,
    )


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")] = None,
    cache: Annotated[Path | None, typer.Option("--cache", help="The store's folder; by default $CPT_CACHE or ~/.cache/cpt.")] = None,
) -> None:
    """Fill the store; what is there already is not made again, and what was killed goes on where it was."""
    show_log()
    start = time.monotonic()
    prepared = prepare_recipe(load_recipe(recipe, overrides or ()), cache)
    seconds = f"{time.monotonic() - start:.1f} s"
    if began := [source.name for source in prepared.sources if source.is_estimate]:
        typer.echo(f"Of {', '.join(began)} only what a run begins with, for `data.disk_bytes` bounds the store ({seconds}).")
    else:
        documents = sum(source.documents for source in prepared.sources)
        typer.echo(f"{prepared.num_tokens:,} tokens of {documents:,} documents are ready ({seconds}).")
