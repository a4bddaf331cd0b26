"""`cpt recipes` and `cpt import`: start from a shipped recipe, or from an axolotl or LLaMA-Factory config."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Annotated

import typer

from cpt.command_line import Force
from cpt.distributed import print_once
from cpt.errors import RecipeError, ResourceError
from cpt.files import SHIPPED_FILES
from cpt.formatting import open_console
from cpt.importers import axolotl, llamafactory
from cpt.importers.translation import Translation
from cpt.plugins import did_you_mean
from cpt.recipe.tree import Mistakes, plain, read_or_raise

FOLDERS = ("recipes", "deepspeed_configs", "launch")
PARTS = ("models", "mixtures", "presets")  # folders of recipes/ with shared sections, not runs
EXAMPLE = "recipes/tiny/pretrain.yaml"
TRANSLATORS: dict[str, tuple[str, Callable[[Translation], None]]] = {
    "axolotl": (axolotl.NEEDS, axolotl.translate),
    "llamafactory": (llamafactory.NEEDS, llamafactory.translate),
}
"""Tool -> the key of the model, which identifies its configs, and the function that fills in the recipe."""


def command(
    copy: Annotated[Path | None, typer.Option(help="Copy the recipes into this folder.", metavar="FOLDER")] = None,
) -> None:
    """List the recipes that come with cpt, or copy them into a folder.

    Example: cpt recipes --copy .
    """
    console = open_console()
    if copy is not None:
        if existing := [name for name in FOLDERS if (copy / name).exists()]:
            raise ResourceError(f"{copy}: {', '.join(existing)} exists already. Name another folder.")
        for folder in FOLDERS:
            copytree(SHIPPED_FILES / folder, copy / folder)
        console.print(f"{', '.join(FOLDERS)} are in {copy}. Next, in that folder: cpt check {EXAMPLE}", markup=False)
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


def import_command(
    config: Annotated[Path, typer.Argument(help="The YAML config of axolotl or LLaMA-Factory.")],
    output: Annotated[Path, typer.Option(help="The recipe's file.")] = Path("recipe.yaml"),
    gpus: Annotated[int, typer.Option(help="GPUs of that run, to convert steps to tokens.", min=1)] = 1,
    force: Force = False,
) -> None:
    """Translate an axolotl or LLaMA-Factory config into a recipe, and list the keys that were not translated.

    Example: cpt import axolotl.yml --gpus 4 --output recipe.yaml
    """
    found = translated(config, gpus)
    if output.exists() and not force:
        raise RecipeError(f"{output} exists. Choose another name with --output, or overwrite it with --force.")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(found.text(), encoding="utf-8")
    missing = found.not_translated()
    if missing:
        print_once("\n  ".join([f"Not translated ({len(missing)}):", *missing]))
    print_once(f"Wrote {output}. Next: cpt check {output}")


def translated(path: Path, gpus: int = 1) -> Translation:
    """Translate a config of a run on `gpus` GPUs; nothing is written. RecipeError if it is not a config of either
    tool, or has no model or dataset."""
    mistakes = Mistakes()
    root = read_or_raise(path, mistakes)
    mistakes.raise_if_any()
    if {"model", "data", "budget"} <= root.value.keys():
        raise RecipeError(f"{path} is a recipe already. Check it: cpt check {path}")
    # The tool whose key for the model is in the config.
    named = [tool for tool, (needed, _) in TRANSLATORS.items() if needed in root.value]
    if len(named) != 1:
        names = " and ".join(f"`{needed}` ({tool})" for tool, (needed, _) in TRANSLATORS.items())
        raise RecipeError(f"{path}: {'both' if named else 'neither'} of {names} found. Set one, the model.")
    tool = named[0]
    needed, translate = TRANSLATORS[tool]
    lines = {key: node.place.line for key, node in root.value.items()}
    found = Translation(path, tool, plain(root), lines, gpus)
    if not isinstance(found.values.get(needed), str):
        raise RecipeError(f"{path}: `{needed}` is missing: the model to start from.{did_you_mean(needed, lines)}")
    try:
        translate(found)
    except (TypeError, ValueError, AttributeError) as problem:  # such as a list for a number: the tool refuses it too
        raise RecipeError(f"{path}: a value has a type that {tool} does not accept: {problem}") from problem
    return found
