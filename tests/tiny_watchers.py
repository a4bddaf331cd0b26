"""Callbacks and watching functions of users, good ones and others."""

import torch
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from cpt.errors import DataError

SEEN: list[dict[str, float]] = []


def note(figures: dict[str, float], *, above: float = 1e9) -> str | None:
    """A watching function."""
    SEEN.append(figures)
    return f"The loss is {figures['loss']:.3f}." if figures.get("loss", 0) > above else None


def fails(figures):
    raise KeyError("x")


def answers_a_number(figures):
    return 3


def refuses(figures):
    raise DataError("this is meant")


class Adds(TrainerCallback):
    """Adds a metric of its own, and ends the run after a step."""

    def __init__(self, metric: str, stop_at: int = 99) -> None:
        self.metric, self.stop_at, self.value = metric, stop_at, 7.0

    def on_log(self, args, state, control, logs=None, **_):
        logs[self.metric] = self.value

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= self.stop_at
        return control


class AddsTensor(Adds):
    def __init__(self) -> None:
        super().__init__("odd")
        self.value = torch.ones(2)


class Counts(TrainerCallback, ExportableState):
    """Counts the steps of a run, over its restarts."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args, state, control, **_):
        self.steps += 1

    def on_log(self, args, state, control, logs=None, **_):
        logs["counted"] = self.steps

    def state(self):
        return {"args": {}, "attributes": {"steps": self.steps}}


class Patient(EarlyStoppingCallback):
    """A subclass of a callback that cannot work."""


class NoCallback:
    """A class of another kind."""
