"""Trackers (TensorBoard, wandb, ...): they come last, hear of the run's events too, and cost a warning where they
fail, not the run."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, TensorBoardCallback, WandbCallback

from cpt.runs.events import read_new_events, record_event

log = logging.getLogger("cpt")
SECONDS_BETWEEN_TRIES = 60.0
SENTENCES_AT_ONCE = 20
TAKE_TEXT = (TensorBoardCallback, WandbCallback)  # others complain of it, or drop it


def put_trackers_last(trainer: Trainer, run: Path) -> None:
    """Let the trackers of `monitoring.trackers` see what other callbacks add to the logs; call it when all others are
    there.

    Hugging Face calls callbacks in the order in which they came, and its trackers come first.
    """
    handler = trainer.callback_handler
    kinds: tuple[type[TrainerCallback], ...] = tuple(INTEGRATION_TO_CALLBACK.values())
    trackers = [callback for callback in handler.callbacks if isinstance(callback, kinds)]
    if trackers:
        others = [callback for callback in handler.callbacks if callback not in trackers]
        handler.callbacks = [*others, EventsForTrackers(run), *(Tracker(tracker, run) for tracker in trackers)]


class EventsForTrackers(TrainerCallback):
    """Adds to each log how often each kind of event happened to the run so far, as `events/<kind>`, and new ones in
    words, as `events`.

    They are read from events.jsonl, so those of other processes, of earlier starts and of a supervisor are among them.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.place = 0
        self.counts = Counter[str]()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Only the main process has trackers."""
        if not state.is_world_process_zero:
            return
        events, self.place = read_new_events(self.run, self.place)
        self.counts.update(str(event.get("kind")) for event in events)
        kwargs["logs"].update({f"events/{kind}": number for kind, number in self.counts.items()})
        if events:
            kwargs["logs"]["events"] = "\n\n".join(str(event.get("message")) for event in events[-SENTENCES_AT_ONCE:])


class Tracker(TrainerCallback):
    """One tracker, whose disk may be full and whose network may be gone; then it is left alone for a while."""

    def __init__(self, tracker: TrainerCallback, run: Path) -> None:
        self.tracker, self.run = tracker, run
        self.has_failed = False
        self.silent_until = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Passed on."""
        self.tell(self.tracker.on_train_begin, args, state, control, **kwargs)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Passed on."""
        self.tell(self.tracker.on_step_end, args, state, control, **kwargs)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Passed on; once this succeeds the tracker works again."""
        if not isinstance(self.tracker, TAKE_TEXT):
            kwargs["logs"] = {name: value for name, value in kwargs["logs"].items() if not isinstance(value, str)}
        if self.tell(self.tracker.on_log, args, state, control, **kwargs):
            self.has_failed = False

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Passed on."""
        self.tell(self.tracker.on_evaluate, args, state, control, **kwargs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Passed on."""
        self.tell(self.tracker.on_save, args, state, control, **kwargs)

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Passed on."""
        self.tell(self.tracker.on_push_begin, args, state, control, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Passed on, whatever was before."""
        self.silent_until = 0.0
        self.tell(self.tracker.on_train_end, args, state, control, **kwargs)

    def tell(
        self,
        call: Callable[..., None],
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> bool:
        """Pass the call on, unless one failed a moment ago; whether it did what it should."""
        if time.monotonic() < self.silent_until:
            return False
        try:
            call(args, state, control, **kwargs)
        except OSError as problem:
            if not self.has_failed:
                text = f"{type(self.tracker).__name__} failed, and misses what comes until it works again: {problem}."
                record_event(self.run, "tracker_failed", text, step=state.global_step)
            self.has_failed, self.silent_until = True, time.monotonic() + SECONDS_BETWEEN_TRIES
            if isinstance(self.tracker, TensorBoardCallback):
                self.tracker.tb_writer = None  # its thread is dead for good; the next log makes another
            return False
        return True
