"""The columns that a stage's examples have, read from its source: importing a stage's trainer takes seconds."""

import ast

from cpt.errors import RecipeError, ResourceError
from cpt.python_sources import imported_module, parse_module
from cpt.recipe.huggingface_keys import STAGE_CONFIGS

NAME = "COLUMNS"


def columns_of_stage(stage: str) -> tuple[str, ...]:
    """What the stage's module calls COLUMNS.

    Args:
        stage: a built-in's name, or the user's `package.module`.

    Raises:
        RecipeError: there is no such module, or its source does not show them.
    """
    module = f"cpt.stages.{stage}" if stage in STAGE_CONFIGS else stage
    try:
        columns = columns_in(module)
    except ResourceError as problem:
        raise RecipeError(f"`stage`: {problem}") from problem
    if columns is None:
        raise RecipeError(
            f'`stage`: `{stage}` must say which columns its examples have, as in {NAME} = ("prompt", "chosen",'
            ' "rejected").'
        )
    return columns


def assigns(node: ast.Assign) -> bool:
    """Whether a statement says which columns there are, word for word."""
    words = node.value.elts if isinstance(node.value, ast.Tuple | ast.List) else [node.value]
    names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    return (
        NAME in names
        and all(isinstance(word, ast.Constant) for word in words)
        and isinstance(node.value, ast.Tuple | ast.List)
    )


def columns_in(module: str) -> tuple[str, ...] | None:
    """Those that a module assigns or imports."""
    source = parse_module(module)
    for node in source.tree.body if source else ():
        if isinstance(node, ast.Assign) and assigns(node):
            return tuple(map(str, ast.literal_eval(node.value)))
        if source and isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == NAME and alias.name == NAME:
                    return columns_in(imported_module(source, node))
    return None
