"""Any optimizer class of any library by its name, `torch.optim:NAdam`: its own arguments become the recipe's
options."""

import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

GIVEN = ("self", "params", "lr")
LIBRARIES = ("torch.optim", "bitsandbytes.optim")


def class_called(name: str) -> str | None:
    """`bitsandbytes.optim:Lion` for `lion`: the class of that name in an installed library."""
    for library in LIBRARIES:
        if find_spec(library.partition(".")[0]) is not None:
            for found, value in vars(import_module(library)).items():
                if (
                    isinstance(value, type)
                    and issubclass(value, torch.optim.Optimizer)
                    and found.lower() == name.replace("_", "").lower()
                ):
                    return f"{library}:{found}"
    return None


def as_function(found: Callable[..., Any]) -> Callable[..., Any]:
    """A function of groups and learning rate, whose keyword arguments are the class's; anything but an optimizer class
    stays as it is."""
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        return found

    def build(groups: list[dict[str, Any]], learning_rate: float, **options: Any) -> torch.optim.Optimizer:
        """Lists of a recipe are tuples for torch."""
        tuples: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
        }
        kind: Callable[..., torch.optim.Optimizer] = found
        return kind(groups, lr=learning_rate, **tuples)

    taken = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=inspect.Parameter.empty)
        for name, parameter in inspect.signature(found.__init__).parameters.items()
        if name not in GIVEN and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("groups", "learning_rate")]
    build.__signature__ = inspect.Signature([*first, *taken])  # type: ignore[attr-defined]  # what `check_options` reads
    build.__name__ = found.__name__
    build.__annotations__ = {}
    return build
