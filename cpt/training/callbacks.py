"""Callbacks that the recipe names, and trackers (TensorBoard, wandb, ...): errors of either do not end the run."""

import inspect
import math
import time
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, TensorBoardCallback

from cpt.errors import CptError, RecipeError
from cpt.plugins import check_options, find
from cpt.recipe.schema import Component
from cpt.runs.events import record_event
from cpt.training.figures import Cost

EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
LOGGED = (int, float, str)  # what a callback may add to a log


class Alert(TrainerCallback):
    """Records an event `alert` when a figure crosses a bound, once each time; NaN is beyond any bound.

    Args:
        run: the run's folder.
        figure: its name in metrics.jsonl: `grad_norm` or `eval_general_loss`.
        above, below: one of them or both.
    """

    def __init__(self, run: Path, *, figure: str, above: float | None = None, below: float | None = None) -> None:
        if above is None and below is None:
            raise RecipeError(f"an alert on `{figure}` needs `above` or `below`.")
        self.run, self.figure, self.above, self.below = run, figure, above, below
        self.was_beyond = False
        self.known: set[str] = set()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.known |= kwargs["logs"].keys()
        value = kwargs["logs"].get(self.figure)
        if not state.is_world_process_zero or not isinstance(value, int | float):
            return
        bound = self.crossed(value)
        if bound and not self.was_beyond:
            message = f"Step {state.global_step}: {self.figure} is {value:.6g}, {bound}."
            record_event(self.run, "alert", message, step=state.global_step, figure=self.figure, value=str(value))
        self.was_beyond = bool(bound)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero and self.known and self.figure not in self.known:
            message = f"The alert's figure {self.figure} was never logged. Logged: {', '.join(sorted(self.known))}."
            record_event(self.run, "alert_without_figure", message, step=state.global_step, figure=self.figure)

    def crossed(self, value: float) -> str:
        """The bound in words; empty within the bounds."""
        if self.above is not None and not value <= self.above:
            return f"above {self.above:g}"
        if self.below is not None and not value >= self.below:
            return f"below {self.below:g}"
        return ""


CALLBACKS: dict[str, type[Alert] | type[Cost]] = {"alert": Alert, "cost": Cost}


def check_callbacks(sections: list[Component]) -> None:
    """Check that the callbacks of `monitoring.callbacks` exist and take their options.

    Raises:
        RecipeError: with the key.
    """
    for number, section in enumerate(sections):
        key = f"monitoring.callbacks[{number}]"
        try:
            found: Any = find("callback", section.name, CALLBACKS)
        except RecipeError as problem:
            raise RecipeError(f"`{key}.name`: {problem}") from problem
        if not isinstance(found, type):
            check_options(found, section.options, key)
            continue
        if not issubclass(found, TrainerCallback):
            raise RecipeError(f"`{key}.name`: {section.name} is not a subclass of transformers.TrainerCallback.")
        is_ours = section.name in CALLBACKS
        check_options(constructor_of(found), section.options, key, given=("run",) if is_ours else ())
        if is_ours:
            try:
                CALLBACKS[section.name](Path(), **section.options)
            except RecipeError as problem:
                raise RecipeError(f"`{key}`: {problem}") from problem


def constructor_of(kind: type) -> Callable[..., None]:
    """The constructor with all parameters by keyword: a class's options need not come after a `*`."""
    constructor: Any = update_wrapper(partial(kind), vars(kind).get("__init__", kind))
    constructor.__name__ = kind.__name__
    parameters = inspect.signature(kind).parameters.values()
    by_keyword = [p.replace(kind=p.KEYWORD_ONLY) if p.kind is p.POSITIONAL_OR_KEYWORD else p for p in parameters]
    constructor.__signature__ = inspect.Signature(by_keyword)
    return constructor  # type: ignore[no-any-return]


def build_callbacks(sections: list[Component], run: Path, tokens_per_step: int) -> list[TrainerCallback]:
    """The callbacks that the recipe names, in its order.

    Args:
        run: the run's folder.
    """
    built: list[TrainerCallback] = []
    for section in sections:
        found: Any = find("callback", section.name, CALLBACKS)
        if section.name in CALLBACKS:
            built.append(found(run, **section.options))
        elif isinstance(found, type):
            built.append(guarded(make(found, section), section.name, run))
        else:
            built.append(guarded(Watch(found, section.options, run, tokens_per_step), section.name, run))
    return built


def make(kind: type[TrainerCallback], section: Component) -> TrainerCallback:
    """The user's callback.

    Raises:
        RecipeError: its constructor fails.
    """
    try:
        return kind(**section.options)
    except CptError:
        raise
    except Exception as problem:
        raise RecipeError(
            f"`monitoring.callbacks`: {section.name} cannot be constructed: {type(problem).__name__}: {problem}"
        ) from problem


class Watch(TrainerCallback):
    """A function that gets the figures of each log on the main process; a returned sentence is an event `alert`."""

    def __init__(
        self, watch: Callable[..., object], options: Mapping[str, object], run: Path, tokens_per_step: int
    ) -> None:
        self.watch, self.options, self.run, self.tokens_per_step = watch, options, run, tokens_per_step

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        figures = {name: float(value) for name, value in kwargs["logs"].items() if isinstance(value, int | float)}
        figures |= {"step": float(state.global_step), "tokens": float(state.global_step * self.tokens_per_step)}
        sentence = self.watch(figures, **self.options)
        if sentence is not None and not isinstance(sentence, str):
            raise TypeError(f"expected a sentence or None, got {type(sentence).__name__}")
        if sentence:
            record_event(self.run, "alert", sentence, step=state.global_step)


class GuardedCallback(TrainerCallback):
    """Passes events on to a callback. If one fails, an event of the run says so, and the callback is not called again
    for `pause_seconds`."""

    kind = "callback_failed"
    errors: type[Exception] = Exception
    pause_seconds = math.inf

    def __init__(self, callback: TrainerCallback, name: str, run: Path) -> None:
        self.callback, self.name, self.run = callback, name, run
        self.has_failed, self.paused_until = False, -math.inf
        for event in EVENTS:
            if getattr(type(callback), event) is not getattr(TrainerCallback, event):
                setattr(self, event, self.passed_on(event))

    def passed_on(self, event: str) -> Callable[..., TrainerControl | None]:
        """The guarded call of one event."""

        def call(
            args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
        ) -> TrainerControl | None:
            is_last_chance = event == "on_train_end" and self.pause_seconds < math.inf
            if time.monotonic() < self.paused_until and not is_last_chance:
                return None
            logs: dict[str, Any] = kwargs.get("logs") or {}
            before = dict(logs)
            try:
                answer: TrainerControl | None = getattr(self.callback, event)(args, state, control, **kwargs)
                for name, value in logs.items():
                    if not isinstance(value, LOGGED):
                        raise TypeError(f"the figure `{name}` is a {type(value).__name__}, not a number or text")
            except CptError:
                raise
            except self.errors as problem:
                logs.clear()
                logs.update(before)
                self.pause(event, problem, state.global_step)
                return None
            self.has_failed = self.has_failed and event != "on_log"
            return answer

        return call

    def pause(self, event: str, problem: Exception, step: int) -> None:
        self.paused_until = time.monotonic() + self.pause_seconds
        if not self.has_failed:
            text = f"`{self.name}` failed in {event} and pauses: {type(problem).__name__}: {problem}."
            record_event(self.run, self.kind, text, step=step)
        self.has_failed = True


def guarded(callback: TrainerCallback, name: str, run: Path) -> GuardedCallback:
    """The guarded callback, in a class of its own: transformers warns about two callbacks of one class."""
    kind: type[GuardedCallback] = type(name, (GuardedCallback,), {})
    return kind(callback, name, run)


def put_trackers_last(trainer: Trainer, run: Path) -> None:
    """Let the trackers see what other callbacks add to the logs; call it after those were added.

    Hugging Face calls callbacks in the order in which they were added, and its trackers come first.
    """
    handler = trainer.callback_handler
    kinds: tuple[type[TrainerCallback], ...] = tuple(INTEGRATION_TO_CALLBACK.values())
    trackers = [callback for callback in handler.callbacks if isinstance(callback, kinds)]
    if trackers:
        others = [callback for callback in handler.callbacks if callback not in trackers]
        guarded = [Tracker(tracker, type(tracker).__name__, run) for tracker in trackers]
        handler.callbacks = [*others, *guarded]


class Tracker(GuardedCallback):
    """A tracker whose disk may be full and whose network may be gone: it pauses for a minute, then is tried again."""

    kind = "tracker_failed"
    errors = OSError
    pause_seconds = 60.0

    def pause(self, event: str, problem: Exception, step: int) -> None:
        """TensorBoard's writing thread does not survive an error; the next log makes another."""
        super().pause(event, problem, step)
        if isinstance(self.callback, TensorBoardCallback):
            self.callback.tb_writer = None
