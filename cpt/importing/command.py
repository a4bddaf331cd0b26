"""`cpt import CONFIG`: a recipe from a config of axolotl or LLaMA-Factory, and the list of what it could not carry
over."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cpt.errors import RecipeError, ResourceError
from cpt.extend import did_you_mean
from cpt.importing import axolotl_keys, llamafactory_keys
from cpt.importing.axolotl import import_axolotl
from cpt.importing.config import kind_of, read_config
from cpt.importing.ledger import Ledger
from cpt.importing.llamafactory import import_llamafactory, trainer_keys
from cpt.importing.table import table_of
from cpt.importing.writing import recipe_text
from cpt.ranks import tell
from cpt.recipe.load import load_recipe


class Tool(StrEnum):
    """Whose config it is."""

    AXOLOTL = "axolotl"
    LLAMAFACTORY = "llamafactory"


IMPORTS: dict[Tool, Callable[[Ledger], None]] = {Tool.AXOLOTL: import_axolotl, Tool.LLAMAFACTORY: import_llamafactory}
NEEDED: dict[str, str] = {Tool.AXOLOTL: "base_model", Tool.LLAMAFACTORY: "model_name_or_path"}


def command(
    config: Annotated[Path, typer.Argument(help="The YAML file of a run of axolotl or LLaMA-Factory.")],
    tool: Annotated[
        Tool | None, typer.Option("--from", help="Whose config it is; by default told by its keys.")
    ] = None,
    output: Annotated[Path, typer.Option(help="The recipe's file.")] = Path("recipe.yaml"),
    gpus: Annotated[
        int, typer.Option(help="GPUs of the run there: what it counts in steps is in tokens here.", min=1)
    ] = 1,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
) -> None:
    """Write a recipe that does the same, and list every key of the config: carried over, otherwise, or not.

    Every key of the config is listed: carried over, otherwise, or not.

    Example: cpt import axolotl.yml --gpus 4 --output recipe.yaml
    """
    ledger = imported(config, tool, gpus)
    if output.exists() and not force:
        raise RecipeError(f"{output} exists. Choose another name with --output, or write over it with --force.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(recipe_text(ledger), encoding="utf-8")
    except OSError as problem:
        raise ResourceError(
            f"{output}: cannot be written: {problem.strerror}. Name another place: --output FILE.yaml"
        ) from problem
    tell(table_of(ledger))
    load_recipe(output)  # shape and sense; what it refers to is looked at by `cpt check`
    tell(f"\n{output} is written, from {len(ledger.config.values)} keys of {config}. Next: cpt check {output}")


def imported(path: Path, tool: Tool | None = None, gpus: int = 1) -> Ledger:
    """The recipe that a config means, and what became of each of its keys.

    Raises:
        RecipeError: it is no config of either tool, or names no model or no dataset.
    """
    config = read_config(path)
    known: dict[str, set[str]] = {
        Tool.AXOLOTL: {*axolotl_keys.KNOWN},
        Tool.LLAMAFACTORY: {*llamafactory_keys.KNOWN, *trainer_keys()},
    }
    told = tool or Tool(kind_of(config, known, NEEDED))
    needed = NEEDED[told]
    if not isinstance(config.values.get(needed), str):
        hint = did_you_mean(needed, [key for key in config.values if key not in known[told]])
        raise RecipeError(f"{path}: `{needed}` is missing, which {told} needs: the model to start from.{hint}")
    ledger = Ledger(config, str(told), gpus)
    IMPORTS[told](ledger)
    return ledger
