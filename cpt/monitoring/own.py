"""Callbacks that the recipe names: built-in ones, and the user's own, whose mistakes cost an event and their silence,
not the run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.errors import CptError, RecipeError
from cpt.extend import check_options, find
from cpt.monitoring.alert import Alert
from cpt.monitoring.constructors import check_constructor
from cpt.monitoring.cost import Cost
from cpt.recipe.schema import Watcher
from cpt.runs.events import record_event

CALLBACKS: dict[str, type[Alert] | type[Cost]] = {"alert": Alert, "cost": Cost}
EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
LOGGED = (int, float, str)  # what a figure, or what is said of it, may be


def check_callbacks(sections: list[Watcher]) -> None:
    """The callbacks of `monitoring.callbacks` exist and take the options that they are given.

    Raises:
        RecipeError: with the key.
    """
    for number, section in enumerate(sections):
        key = f"monitoring.callbacks[{number}]"
        try:
            found = find("callback", section.name, CALLBACKS)
        except RecipeError as problem:
            raise RecipeError(f"`{key}.name`: {problem}") from problem
        if isinstance(found, type) and not issubclass(found, TrainerCallback):
            raise RecipeError(
                f"`{key}.name`: {section.name} is a class, and no transformers.TrainerCallback. Derive it from that."
            )
        if isinstance(found, type):
            check_constructor(found, section.options, key, given=("run",) if section.name in CALLBACKS else ())
        else:
            check_options(found, section.options, key)
        if section.name in CALLBACKS:
            try:
                CALLBACKS[section.name](Path(), **section.options)
            except RecipeError as problem:
                raise RecipeError(f"`{key}`: {problem}") from problem


def build_callbacks(sections: list[Watcher], run: Path, tokens_per_step: int) -> list[TrainerCallback]:
    """Those that the recipe names, in its order.

    Args:
        run: the run's folder.
    """
    built: list[TrainerCallback] = []
    for section in sections:
        found: Any = find("callback", section.name, CALLBACKS)
        if section.name in CALLBACKS:
            built.append(found(run, **section.options))
        elif isinstance(found, type):
            built.append(guard(make(found, section), section.name, run))
        else:
            built.append(guard(Watch(found, section.options, run, tokens_per_step), section.name, run))
    return built


def make(kind: type[TrainerCallback], section: Watcher) -> TrainerCallback:
    """The user's callback; what fails before the run begins is a mistake of the recipe.

    Raises:
        RecipeError: it fails.
    """
    try:
        return kind(**section.options)
    except CptError:
        raise
    except Exception as problem:
        raise RecipeError(
            f"`monitoring.callbacks`: {section.name} cannot be made: {type(problem).__name__}: {problem}"
        ) from problem


def guard(callback: TrainerCallback, name: str, run: Path) -> "OwnCallback":
    """The callback behind `OwnCallback`, in a class of its own: transformers warns where two callbacks are of one."""
    kind: type[OwnCallback] = type(name, (OwnCallback,), {})
    return kind(callback, name, run)


class Watch(TrainerCallback):
    """A function that is shown the figures of each log; a sentence that it returns is an event `alert`."""

    def __init__(
        self, watch: Callable[..., object], options: Mapping[str, object], run: Path, tokens_per_step: int
    ) -> None:
        self.watch, self.options, self.run, self.tokens_per_step = watch, options, run, tokens_per_step

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """On the main process."""
        if not state.is_world_process_zero:
            return
        figures = {name: float(value) for name, value in kwargs["logs"].items() if isinstance(value, int | float)}
        figures |= {"step": float(state.global_step), "tokens": float(state.global_step * self.tokens_per_step)}
        said = self.watch(figures, **self.options)
        if said is not None and not isinstance(said, str):
            raise TypeError(f"it returned {type(said).__name__}, where a sentence or None is wanted")
        if said:
            record_event(self.run, "alert", said, step=state.global_step)


class OwnCallback(TrainerCallback):
    """A callback of the user's: once it fails it is silent, and an event says why.

    Only events that it has a method for are passed on.
    """

    def __init__(self, callback: TrainerCallback, name: str, run: Path) -> None:
        self.callback, self.name, self.run = callback, name, run
        self.has_failed = False
        for event in EVENTS:
            if getattr(type(callback), event) is not getattr(TrainerCallback, event):
                setattr(self, event, self.passed_on(event, getattr(callback, event)))

    def passed_on(
        self, event: str, call: Callable[..., TrainerControl | None]
    ) -> Callable[..., TrainerControl | None]:
        """The call, and what becomes of its mistakes."""

        def guarded(
            args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
        ) -> TrainerControl | None:
            if self.has_failed:
                return None
            logs: dict[str, Any] = kwargs.get("logs") or {}
            before = dict(logs)
            try:
                answer = call(args, state, control, **kwargs)
                refuse_other_values(logs)
            except CptError:
                raise
            except Exception as problem:
                logs.clear()
                logs.update(before)
                self.fall_silent(event, problem, state.global_step)
                return None
            return answer

        return guarded

    def fall_silent(self, event: str, problem: Exception, step: int) -> None:
        """Say why."""
        self.has_failed = True
        text = f"`{self.name}` failed in {event} and is silent from here on: {type(problem).__name__}: {problem}."
        record_event(self.run, "callback_failed", text, step=step)


def refuse_other_values(logs: Mapping[str, object]) -> None:
    """What a callback adds to the figures has to go into a line of JSON.

    Raises:
        TypeError: it does not.
    """
    for name, value in logs.items():
        if not isinstance(value, LOGGED):
            raise TypeError(f"the figure `{name}` is a {type(value).__name__}, and neither number nor text")
