"""`python -m cpt.reference`: write docs/reference/recipe.md and commands.md; `make docs` does it first."""

import sys
from pathlib import Path

from cpt.reference.commands_page import commands_page
from cpt.reference.recipe_page import recipe_page

ROOT = Path(__file__).parents[2]
PAGES = {"recipe.md": recipe_page, "commands.md": commands_page}


def main(folder: Path = ROOT / "docs" / "reference") -> None:
    """Write the pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
