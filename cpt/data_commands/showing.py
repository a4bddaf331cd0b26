"""What the commands of `cpt data` share: the recipe's sources by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from cpt.data.checking.files import keyed_sources
from cpt.data.form_of_stage import sections_of
from cpt.errors import RecipeError
from cpt.extend import did_you_mean
from cpt.recipe.schema import DocumentSource, Recipe
from cpt.recipe.sense_data import reported_name

RecipePath = Annotated[Path, typer.Argument(help="The recipe's YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")]
OneSource = Annotated[str | None, typer.Option(help="Only the source of this name.")]


def chosen_sources(recipe: Recipe, name: str | None) -> Iterator[tuple[str, DocumentSource]]:
    """All sources and held-out sets, or the one of that name."""
    keyed = list(keyed_sources(*sections_of(recipe)))
    names = [reported_name(one) for _, one in keyed]
    if name is not None and name not in names:
        raise RecipeError(f"no source is called `{name}`.{did_you_mean(name, names)} There is: {', '.join(names)}.")
    yield from ((key, one) for key, one in keyed if name in (None, reported_name(one)))
