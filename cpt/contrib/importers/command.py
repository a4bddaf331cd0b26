"""`cpt import`: start from another tool's config."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from cpt.command_line import Force
from cpt.contrib.importers import axolotl, llamafactory, ms_swift
from cpt.contrib.importers.translation import Translation
from cpt.distributed import print_once
from cpt.errors import RecipeError
from cpt.plugins import did_you_mean
from cpt.recipe.tree import Mistakes, plain, read_or_raise

TRANSLATORS: dict[str, tuple[tuple[str, ...], Callable[[Translation], None]]] = {
    "axolotl": (axolotl.KEYS, axolotl.translate),
    "llamafactory": (llamafactory.KEYS, llamafactory.translate),
    "ms-swift": (ms_swift.KEYS, ms_swift.translate),
}
"""Tool -> the keys that identify its configs, its model first, and the function that fills in the recipe."""


def command(
    config: Annotated[
        Path,
        typer.Argument(
            help="A YAML config of axolotl, LLaMA-Factory or ms-swift, or a shell script of ms-swift."
        ),
    ],
    output: Annotated[Path, typer.Option(help="The recipe's file.")] = Path("recipe.yaml"),
    gpus: Annotated[
        int, typer.Option(help="GPUs of that run, to convert steps to tokens.", min=1)
    ] = 1,
    force: Force = False,
) -> None:
    """Translate a config of axolotl, LLaMA-Factory or ms-swift into a recipe, and list the untranslated keys.

    Example: cpt import axolotl.yml --gpus 4 --output recipe.yaml
    """
    translation = translated(config, gpus)
    if output.exists() and not force:
        raise RecipeError(
            f"{output} exists. Choose another name with --output, or overwrite it with --force."
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(translation.text(), encoding="utf-8")
    missing = translation.not_translated()
    if missing:
        print_once("\n  ".join([f"Not translated ({len(missing)}):", *missing]))
    print_once(f"Wrote {output}. Next: cpt check {output}")


def translated(path: Path, gpus: int = 1) -> Translation:
    """Translate a config of a run on `gpus` GPUs; nothing is written. RecipeError if it is not a config of one of the
    tools, or has no model or dataset."""
    if path.suffix == ".sh":
        values, lines = ms_swift.read_script(path)
    else:
        mistakes = Mistakes()
        root = read_or_raise(path, mistakes)
        mistakes.raise_if_any()
        values = plain(root)
        lines = {key: node.position.line for key, node in root.value.items()}
    if {"model", "data", "budget"} <= values.keys():
        raise RecipeError(f"{path} is a recipe already. Check it: cpt check {path}")
    tool = next((tool for tool, (keys, _) in TRANSLATORS.items() if values.keys() & {*keys}), "")
    needed = [keys[0] for keys, _ in TRANSLATORS.values()]
    if not tool:
        near = "".join(did_you_mean(key, lines) for key in needed)
        raise RecipeError(
            f"{path}: expected the model, as {' or '.join(needed)} ({', '.join(TRANSLATORS)}).{near}"
        )
    translation = Translation(path, tool, values, lines, gpus)
    keys, translate = TRANSLATORS[tool]
    if not isinstance(values.get(keys[0]) or values.get("model"), str):
        raise RecipeError(
            f"{path}: `{keys[0]}` is missing: the model to start from.{did_you_mean(keys[0], lines)}"
        )
    translation.refuse_multimodal()
    try:
        translate(translation)
    except (
        TypeError,
        ValueError,
        AttributeError,
    ) as problem:  # such as a list for a number: the tool refuses it too
        raise RecipeError(
            f"{path}: a value has a type that {tool} does not accept: {problem}"
        ) from problem
    return translation
