"""What a class can be given by name, checked as the options of a function are."""

import inspect
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from cpt.extend import check_options

BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_constructor(kind: type, options: Mapping[str, object], key: str, given: Iterable[str] = ()) -> None:
    """As `check_options`; of a class, options need not stand behind a `*`.

    Args:
        key: where the options stand in the recipe.
        given: what cpt itself passes.

    Raises:
        RecipeError: with the key.
    """

    def constructor() -> None:
        """Never called: it has the signature that is looked at."""

    stand_in: Any = constructor
    signature = inspect.signature(kind)
    parameters = [p.replace(kind=p.KEYWORD_ONLY) if p.kind in BY_NAME else p for p in signature.parameters.values()]
    stand_in.__signature__ = signature.replace(parameters=parameters)
    stand_in.__name__ = kind.__name__
    try:
        stand_in.__annotations__ = typing.get_type_hints(vars(kind).get("__init__", constructor))
    except (NameError, TypeError):  # they name what only a type checker knows
        stand_in.__annotations__ = {}
    check_options(stand_in, options, key, given)
