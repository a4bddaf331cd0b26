"""`cpt recipes`: start from a shipped recipe."""

from pathlib import Path
from shutil import copytree
from typing import Annotated

import typer

from cpt.errors import ResourceError
from cpt.files import SHIPPED_FILES
from cpt.formatting import open_console

FOLDERS = ("recipes", "deepspeed_configs", "launch")
PARTS = ("models", "mixtures", "presets")  # folders of recipes/ with shared sections, not runs
EXAMPLE = "recipes/tiny/pretrain.yaml"


def command(
    copy: Annotated[
        Path | None, typer.Option(help="Copy the recipes into this folder.", metavar="FOLDER")
    ] = None,
) -> None:
    """List the recipes that come with cpt, or copy them into a folder.

    Example: cpt recipes --copy .
    """
    console = open_console()
    if copy is not None:
        existing = [name for name in FOLDERS if (copy / name).exists()]
        if existing:
            raise ResourceError(
                f"{copy}: {', '.join(existing)} exists already. Name another folder."
            )
        for folder in FOLDERS:
            copytree(SHIPPED_FILES / folder, copy / folder)
        console.print(
            f"{', '.join(FOLDERS)} are in {copy}. Next, in that folder: cpt check {EXAMPLE}",
            markup=False,
        )
        return
    recipes = SHIPPED_FILES / "recipes"
    for path in sorted(recipes.rglob("*.yaml")):
        name = path.relative_to(recipes)
        if name.parts[0] not in PARTS:
            console.print(f"recipes/{name}", style="bold")
            comment = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
            console.print(f"    {comment}", markup=False)
    console.print(
        f"\nThey are in {SHIPPED_FILES}. `cpt recipes --copy .` copies them here, with the files they use.\n"
        "Any recipe may use their parts: `model: models/llama/1b.yaml`, `deepspeed:"
        " deepspeed_configs/ds_config_zero1.json`.",
        markup=False,
    )
