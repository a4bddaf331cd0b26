"""Turn the recipe's lists of named functions (filters, transforms) into functions, and notice when their code
changes."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cpt.errors import RecipeError, UserCodeError
from cpt.extend import check_options, find
from cpt.recipe.schema import Component

ComponentLists = Mapping[str, Sequence[Component]]  # where a list stands in the recipe -> the list
BuiltIn = Mapping[str, Callable[..., Any]]


def build_components(kind: str, lists: ComponentLists, built_in: BuiltIn) -> list[Callable[..., Any]]:
    """The functions that the recipe names, in order, their options checked and filled in."""
    functions: list[Callable[..., Any]] = []
    for key, components in lists.items():
        for number, component in enumerate(components):
            function = find(kind, component.name, built_in)
            check_options(function, component.options, f"{key}[{number}]")
            functions.append(partial(function, **component.options))
    return functions


def called_on(function: Callable[..., Any], document: Mapping[str, str]) -> Any:
    """What a filter or transform returns for a document.

    Raises:
        UserCodeError: the user's function raised an error; with the file and row of the document.
    """
    try:
        return function(document)
    except UserCodeError as problem:
        raise UserCodeError(f"{document['where']}: {problem}") from problem.__cause__


def module_text(kind: str, name: str, built_in: BuiltIn) -> str:
    """The text of the module that a function comes from, so that stored tokens are made anew when it changes."""
    function = find(kind, name, built_in)
    module = inspect.getmodule(function)
    try:
        return inspect.getsource(module if module is not None and module.__name__ != "__main__" else function)
    except (OSError, TypeError) as problem:
        raise RecipeError(
            f"the {kind} `{name}` must be a function in a Python file, so that we notice when it changes."
        ) from problem


def name_of(function: Callable[..., Any]) -> str:
    """The function's name behind its options."""
    return function.func.__name__ if isinstance(function, partial) else str(function)
