"""Trackers (TensorBoard, wandb, ...): they come after all other callbacks, get the run's events too, and cannot end
the run."""

from collections import Counter
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, TensorBoardCallback

from cpt.monitoring.callbacks import GuardedCallback
from cpt.runs.events import read_events


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
        handler.callbacks = [*others, EventCounts(run), *guarded]


class EventCounts(TrainerCallback):
    """Adds the number of events of each kind so far, of all processes and starts, as `events/<kind>`."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            counts = Counter(str(event.get("kind")) for event in read_events(self.run))
            kwargs["logs"].update({f"events/{kind}": number for kind, number in counts.items()})


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
