"""The gate of reality for many recipes at once, in a process of its own: it needs torch, which a search does not."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

if not __package__:  # started as a file: import from the repository root, not from inside cpt/search/
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from cpt.errors import RecipeError
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.recipe.schema import Recipe

RECIPES, FOUND = "recipes.json", "found.json"


def mistakes_of(recipes: Mapping[str, Recipe]) -> dict[str, list[str]]:
    """What `cpt check` would find in each, by the recipe's name here.

    Raises:
        RecipeError: the checks could not be made at all.
    """
    with TemporaryDirectory(prefix="cpt-search-") as scratch:
        folder = Path(scratch)
        (folder / RECIPES).write_text(json.dumps({name: dump_recipe(recipe) for name, recipe in recipes.items()}))
        ended = subprocess.run([sys.executable, __file__, scratch], capture_output=True, text=True)
        if ended.returncode != 0 or not (folder / FOUND).exists():
            told = (ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()[-1]
            raise RecipeError(
                f"the recipes of the space could not be checked: {told}. Look at one by itself: cpt check RECIPE"
            )
        found: dict[str, list[str]] = json.loads((folder / FOUND).read_text())
    return found


def check_all(folder: Path) -> None:
    """In the process of its own: read the recipes, write what was found."""
    from cpt.preflight.gate import found_in  # with torch

    found = {}
    for name, text in json.loads((folder / RECIPES).read_text()).items():
        path = folder / "recipe.yaml"
        path.write_text(text)
        report = found_in(load_recipe(path))
        found[name] = [f"{type(mistake).__name__}: {mistake}" for mistake in [*report.mistakes, *report.blockers]]
    (folder / FOUND).write_text(json.dumps(found))


if __name__ == "__main__":
    check_all(Path(sys.argv[1]))
