"""`cpt mixture RECIPE`: what the run will really read of each source, before it starts."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cpt.console import open_console
from cpt.data.build import build_data
from cpt.data.form_of_stage import form_of_stage
from cpt.mixture.forecast import Forecast, forecast
from cpt.mixture.plot import plot_forecast
from cpt.mixture.table import print_forecast
from cpt.optim.schedules import phases_in_tokens
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe
from cpt.tokenizer.load import load_tokenizer


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the shares too: shares.png.")] = None,
) -> None:
    """Count what a run will see of each source.

    Exit code 2 where a source gets no row, or more is asked of it than the recipe allows.

    Example: cpt mixture recipe.yaml --plot shares.png
    """
    told = forecast_recipe(load_recipe(recipe, overrides or ()))
    if as_json:
        sys.stdout.write(json.dumps(asdict(told), indent=2) + "\n")
    else:
        print_forecast(told, open_console())
    if plot is not None:
        plot_forecast(told, plot)
    raise typer.Exit(0 if told.is_reached else 2)


def forecast_recipe(recipe: Recipe) -> Forecast:
    """Tokenise what is not yet in the store, and count."""
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    # Without the budget it does not refuse sources that run out, which is for the forecast to tell.
    return forecast(
        recipe,
        build_data(
            phases_in_tokens(recipe),
            tokenizer,
            seed=recipe.seed,
            evaluation=recipe.evaluation,
            form=form_of_stage(recipe.stage),
        ),
    )
