"""Continued pre-training of causal language models, and the stages around it, from one YAML recipe.

The functions below are the Python API; they are imported when first used, so that `import cpt` loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpt.api import *  # noqa: F403
    from cpt.recipe.load import load_recipe

# ruff: noqa: F405
__all__ = [
    "RunPlan",
    "build_data",
    "build_model",
    "build_trainer",
    "compare_runs",
    "evaluate_model",
    "export_model",
    "load_recipe",
    "load_tokenizer",
    "open_mixture",
    "plan_run",
    "resolve_recipe",
]

LIGHT = {"load_recipe": ".recipe.load", "open_mixture": ".data.rows.build"}  # without the Trainer


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'cpt' has no attribute {name!r}")
    return getattr(import_module(LIGHT.get(name, ".api"), __name__), name)


def __dir__() -> list[str]:
    return __all__
