"""`cpt mixture RECIPE`: forecast what a run will read of each source, or show what a changed run has read."""

from dataclasses import asdict
from pathlib import Path

import typer

from cpt.command_line import AsJson, Overrides, RecipePath, print_json
from cpt.formatting import open_console
from cpt.recipe.load import load_recipe
from cpt.runs.folder import RECIPE, find_run


def command(
    recipe: RecipePath,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Count what a run will read of each source. For the folder of a run whose mixture changed, count what it has read
    of each source between the changes.

    Exit code 2 if a source gets no row, or would need more epochs than the recipe allows.

    Example: cpt mixture recipe.yaml
    """
    if not recipe.is_file() and recipe.suffix not in (".yaml", ".yml"):
        folder = find_run(str(recipe))
        if print_read(folder, as_json=as_json):
            return
        recipe = folder / RECIPE
    loaded = load_recipe(recipe, overrides or ())

    from cpt.analysis.forecast import forecast, print_forecast
    from cpt.data.rows.build import data_of
    from cpt.tokenizer.load import load_tokenizer

    tokenizer = load_tokenizer(loaded.tokenizer, loaded.model)
    # A budget that is too small is a remark of the forecast, not an error.
    prepared = data_of(loaded, tokenizer, checks_budget=False)
    expected = forecast(loaded, prepared)
    if as_json:
        print_json(asdict(expected))
    else:
        print_forecast(expected, open_console())
    raise typer.Exit(0 if expected.is_reached else 2)


def print_read(run: Path, *, as_json: bool) -> bool:
    """Print what the run has read between the changes of its mixture; False if it has never changed."""
    from cpt.analysis.forecast import print_stretches, read_stretches

    stretches = read_stretches(run)
    if stretches and as_json:
        print_json([asdict(stretch) for stretch in stretches])
    elif stretches:
        print_stretches(stretches, open_console())
    return bool(stretches)
