"""Every private name of transformers, TRL, peft, accelerate and the libraries around them that cpt uses, with its
reason; `USED` is the contract that a test checks.

Read in transformers 5.17 and 5.23, TRL 1.12, peft 0.21, accelerate 1.15.
"""

from threading import Thread
from typing import Any

from torch import nn

USED = {  # dotted name -> its parameters ("" for what is not called), why, what ends it
    "transformers.PreTrainedModel._supports_sdpa": ("", "which attention a family has", "a public list of them"),
    "transformers.PreTrainedModel._keys_to_ignore_on_save": (
        "",
        "weights that save_pretrained omits",
        "a public name",
    ),
    "transformers.cli.serve.Serve._thread": (
        "",
        "whether the server's thread still runs",
        "a public wait for its end",
    ),
    "optuna.trial.FrozenTrial._trial_id": (
        "",
        "continue a trial of an earlier process",
        "a public way to continue one",
    ),
}


def supports_sdpa(model: nn.Module | type[nn.Module]) -> bool:
    """True where the family of this model has torch's fused attention."""
    return bool(model._supports_sdpa)


def keys_ignored_on_save(model: nn.Module) -> set[str]:
    """The parameters that `save_pretrained` of this model omits."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def server_thread(serve: Any) -> Thread:
    """The thread in which `transformers serve` answers requests."""
    thread: Thread = serve._thread
    return thread


def trial_id(trial: Any) -> int:
    """Optuna's number of a trial over all studies of its storage."""
    return int(trial._trial_id)
