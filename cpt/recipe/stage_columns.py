"""The columns that a stage's examples have, read from its source: importing a stage's trainer takes seconds."""

import ast

from cpt.errors import RecipeError, ResourceError
from cpt.python_sources import imported_module, parse_module
from cpt.recipe.huggingface_keys import STAGE_CONFIGS

NAME = "COLUMNS"


def columns_of_stage(stage: str) -> tuple[str, ...]:
    """The module's COLUMNS.

    Args:
        stage: a built-in's name, or the user's `package.module`.

    Raises:
        RecipeError: there is no such module, or its source does not give them literally.
    """
    try:
        columns = columns_in(f"cpt.stages.{stage}" if stage in STAGE_CONFIGS else stage)
    except ResourceError as problem:
        raise RecipeError(f"`stage`: {problem}") from problem
    if columns is None:
        example = f'{NAME} = ("prompt", "chosen", "rejected")'
        raise RecipeError(f"`stage`: `{stage}` must say which columns its examples have, as in {example}.")
    return columns


def columns_in(module: str) -> tuple[str, ...] | None:
    """The columns that a module assigns or imports."""
    source = parse_module(module)
    for node in source.tree.body if source else ():
        match node:
            case ast.Assign(targets=[ast.Name(id="COLUMNS")], value=ast.Tuple(elts=words) | ast.List(elts=words)):
                if all(isinstance(word, ast.Constant) for word in words):
                    return tuple(map(str, ast.literal_eval(node.value)))
            case ast.ImportFrom(names=names) if source is not None:
                if any(alias.name == NAME and alias.asname in (None, NAME) for alias in names):
                    return columns_in(imported_module(source, node))
    return None
