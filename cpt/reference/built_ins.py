"""The names that keys of a recipe take, each with what it does and its own options, read from the functions
themselves."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cpt.checkpoints.rotation import RULES
from cpt.data.filters import FILTERS
from cpt.data.transforms import TRANSFORMS
from cpt.evaluation.tasks import DOMAIN_TEST, domain_test_of_recipe, task_of_recipe
from cpt.extend import hints_of
from cpt.monitoring.callbacks import CALLBACKS
from cpt.optim.build import FOR_ALL as OF_ALL_OPTIMIZERS
from cpt.optim.build import OPTIMIZERS
from cpt.optim.schedules import SCHEDULES
from cpt.reference.docstrings import arguments_of, summary_of
from cpt.reference.types_in_words import default_in_words, type_in_words
from cpt.safety.loss_guard import FOR_ALL as OF_ALL_GUARDS
from cpt.safety.loss_guard import LOSS_GUARDS, ROLLBACKS, SKIPS, WINDOW
from cpt.stages.rewards.find import REWARDS

NAMED: dict[str, Mapping[str, Callable[..., Any]]] = {
    "data.transforms": TRANSFORMS,
    "data.filters": FILTERS,
    "optimizer.name": OPTIMIZERS,
    "schedule.name": SCHEDULES,
    "checkpoints.keep": RULES,
    "monitoring.callbacks": CALLBACKS,
    "safety.loss_guard": LOSS_GUARDS,
    "evaluation.tasks": {"hellaswag": task_of_recipe, DOMAIN_TEST: domain_test_of_recipe},
    "rewards": REWARDS,
}
"""Key of the recipe -> the built-ins that it takes by name."""

OF_ALL: dict[str, dict[str, tuple[Any, Any, str]]] = {
    "optimizer.name": {
        "embedding_learning_rate": (
            OF_ALL_OPTIMIZERS["embedding_learning_rate"],
            None,
            "Of embeddings and head, where it is another one.",
        ),
        "layer_decay": (
            OF_ALL_OPTIMIZERS["layer_decay"],
            None,
            "A layer's rate as a share of that of the layer above it.",
        ),
        "release_gradients": (
            OF_ALL_OPTIMIZERS["release_gradients"],
            False,
            (
                "Update each parameter in the backward pass and drop its gradient at once, so that all gradients are"
                " never there together."
            ),
        ),
    },
    "safety.loss_guard": {
        "window": (OF_ALL_GUARDS["window"], WINDOW, "Accepted steps that a new one is compared with."),
        "skips": (
            OF_ALL_GUARDS["skips"],
            SKIPS,
            "More skipped steps than this in the window: back to the last checkpoint, without their rows.",
        ),
        "rollbacks": (OF_ALL_GUARDS["rollbacks"], ROLLBACKS, "How often; then the run stops."),
    },
}
"""Key -> options that every name takes, your own too: (type, default, what it does)."""


@dataclass(frozen=True)
class Option:
    """One option of a built-in."""

    name: str
    kind: str
    default: str
    meaning: str


@dataclass(frozen=True)
class BuiltIn:
    """Something that a recipe names."""

    name: str
    meaning: str
    options: tuple[Option, ...]


def built_ins(key: str) -> list[BuiltIn]:
    """What the key takes by name; none where it takes no names."""
    return [BuiltIn(name, summary_of(function), options_of(function)) for name, function in NAMED.get(key, {}).items()]


def options_of_all(key: str) -> list[Option]:
    """The options that every name takes there."""
    return [
        Option(name, type_in_words(kind), default_in_words(default), meaning)
        for name, (kind, default, meaning) in OF_ALL.get(key, {}).items()
    ]


def options_of(function: Callable[..., Any]) -> tuple[Option, ...]:
    """The keyword arguments of a function, or of a class's constructor."""
    called = vars(function)["__init__"] if isinstance(function, type) else function
    hints, told = hints_of(called), arguments_of(function)
    return tuple(
        Option(name, type_in_words(hints.get(name, Any)), default_in_words(parameter.default), told.get(name, ""))
        for name, parameter in inspect.signature(called).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    )
