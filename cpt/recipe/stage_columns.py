"""The columns that a stage's examples have. Those of a user's stage are read from its source: an import takes
seconds."""

import ast

from cpt.errors import RecipeError, ResourceError
from cpt.python_sources import imported_module, parse_module

NAME = "COLUMNS"
PAIRS, CHAT, PROMPT = ("prompt", "chosen", "rejected"), ("messages",), ("prompt",)
BUILT_IN_COLUMNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("pretrain", "cpt", "distill_text"), ("text",)),
    **dict.fromkeys(("sft", "distill", "gkd"), CHAT),
    **dict.fromkeys(("dpo", "orpo", "cpo", "reward"), PAIRS),
    **dict.fromkeys(("grpo", "rloo", "ppo", "spo", "distill_on_policy"), PROMPT),
    "kto": ("prompt", "completion", "label"),
}


def columns_of_stage(stage: str) -> tuple[str, ...]:
    """The columns of a stage's examples.

    Args:
        stage: a built-in's name, or the user's `package.module`.

    Raises:
        RecipeError: there is no such module, or its source does not give them literally.
    """
    if stage in BUILT_IN_COLUMNS:
        return BUILT_IN_COLUMNS[stage]
    try:
        columns = columns_in(stage)
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
