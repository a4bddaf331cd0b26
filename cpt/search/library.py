"""Optuna, which only a search needs."""

from typing import Any

from cpt.errors import ResourceError


def optuna() -> Any:
    """The package, told to speak only of what goes wrong.

    Raises:
        ResourceError: it is not installed.
    """
    try:
        import optuna
    except ImportError as problem:
        raise ResourceError(
            "`cpt search` draws its values with Optuna. Install it: pip install 'cpt[search]'"
        ) from problem
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
