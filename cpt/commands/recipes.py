"""`cpt recipes`: what comes with cpt to start from, and a copy of it in a folder of one's own."""

from pathlib import Path
from shutil import copytree
from typing import Annotated

import typer

from cpt.console import open_console
from cpt.errors import ResourceError
from cpt.installation import SHIPPED_FILES

FOLDERS = ("recipes", "deepspeed_configs", "launch")
PARTS = ("models", "mixtures", "presets")  # of recipes/: sections that recipes share, no runs
EXAMPLE = "recipes/tiny/pretrain.yaml"


def command(
    copy: Annotated[
        Path | None, typer.Option(help="Folder that gets recipes/, deepspeed_configs/ and launch/.", metavar="FOLDER")
    ] = None,
) -> None:
    """List the recipes that come with cpt, or copy them into a folder of yours.

    Example: cpt recipes --copy .
    """
    if copy is None:
        list_recipes()
    else:
        copy_files(copy)


def list_recipes() -> None:
    """Each run by its file and the first comment in it; the parts that a recipe of one's own may name."""
    console = open_console()
    recipes = SHIPPED_FILES / "recipes"
    for path in sorted(recipes.rglob("*.yaml")):
        name = path.relative_to(recipes)
        if name.parts[0] not in PARTS:
            console.print(f"recipes/{name}", style="bold", highlight=False)
            console.print(f"    {first_comment(path)}", markup=False, highlight=False)
    console.print(
        f"\nThey are in {SHIPPED_FILES}. `cpt recipes --copy .` copies them here, with what they name.", markup=False
    )
    console.print(
        "A recipe anywhere may name their parts: `model: models/llama/1b.yaml`, `deepspeed:"
        " deepspeed_configs/ds_config_zero1.json`."
    )


def first_comment(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def copy_files(folder: Path) -> None:
    """Copy everything that comes with cpt besides its code.

    Raises:
        ResourceError: one of the folders is there already, or nothing can be written.
    """
    there = [name for name in FOLDERS if (folder / name).exists()]
    if there:
        raise ResourceError(
            f"{folder}: {', '.join(there)} exists there already, and nothing is written over. Name another folder."
        )
    try:
        for name in FOLDERS:
            copytree(SHIPPED_FILES / name, folder / name)
    except OSError as problem:
        raise ResourceError(
            f"{folder}: cannot be written: {problem.strerror or problem}. Name another folder: --copy FOLDER"
        ) from problem
    open_console().print(
        f"{', '.join(FOLDERS)} are in {folder}. Try there: cpt check {EXAMPLE}", markup=False, highlight=False
    )
