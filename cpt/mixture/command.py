"""`cpt mixture RECIPE`: what the run will really read of each source, before it starts."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cpt.command_line import refuse_ignored
from cpt.console import open_console
from cpt.data.build import build_data
from cpt.data.form_of_stage import form_of_stage
from cpt.errors import RecipeError
from cpt.mixture.forecast import Forecast, forecast
from cpt.mixture.plot import plot_forecast
from cpt.mixture.table import print_forecast
from cpt.optim.schedules import phases_in_tokens
from cpt.probe.probe import Options, run_probe
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe
from cpt.tokenizer.load import load_tokenizer


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the shares too: shares.png.")] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Short runs over shares of replay and learning rates; forecast the whole.")
    ] = False,
    shares: Annotated[str | None, typer.Option(help="--probe: shares of replay, by default 0,0.1,0.3.")] = None,
    rates: Annotated[
        str | None, typer.Option(help="--probe: peak learning rates, by default the recipe's and a third of it.")
    ] = None,
    probe_tokens: Annotated[
        int | None, typer.Option(help="--probe: tokens of a short run; by default all take 20 % of the budget.", min=1)
    ] = None,
    replay: Annotated[
        list[str] | None, typer.Option(help="--probe: a source that is replay; by default named in evaluation.retain.")
    ] = None,
    launcher: Annotated[
        str | None, typer.Option(help="--probe: what starts each run, such as 'accelerate launch'.")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="--probe: only list the runs and their cost.")] = False,
) -> None:
    """Count what a run will see of each source.

    Exit code 2 where a source gets no row, or more is asked of it than the recipe allows.

    Example: cpt mixture recipe.yaml --plot shares.png
    """
    options = Options(shares, rates, probe_tokens, replay or (), launcher, dry)
    refuse_ignored({"--plot": plot is not None and dry}, "with --dry-run, which measures nothing")
    if probe:
        raise typer.Exit(run_probe(load_recipe(recipe, overrides or ()), options, as_json=as_json, picture=plot))
    if options.given():
        raise RecipeError(f"{', '.join(options.given())} belong(s) to a probe. Add --probe.")
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
