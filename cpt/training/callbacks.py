"""Callbacks: custom callbacks, trackers, the run's files, the console, and the profiler."""

import inspect
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.profiler import ProfilerActivity, profile
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, TensorBoardCallback
from transformers.trainer_callback import ExportableState

from cpt.checkpoints.resume import published_checkpoints
from cpt.errors import CptError, RecipeError
from cpt.evaluation.scoring import restore_state
from cpt.files import LinesFile
from cpt.formatting import format_duration, open_console
from cpt.plugins import check_options, find, with_key
from cpt.recipe.schema import Component
from cpt.runs.events import record_event, write_waiting_events
from cpt.runs.folder import PROFILE, is_until, keep_lines_until
from cpt.runs.record import Run
from cpt.training.metrics import Cost

# Callbacks run by their class's `order`; among equal ones, as they were added. Those without it, also of users and of
# Hugging Face, are at 0.
FIRST = -1
TRACKERS = 1
LAST = 2
EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
LOGGED = (int, float, str)  # types that a callback may add to a log

log = logging.getLogger("cpt")
SECONDS_BETWEEN_TRIES = 60.0  # of a tracker that failed
SHARE_OF_TRIES = 0.05  # of the time, at most, for trackers that wait for a server
SECONDS_BETWEEN_WRITES = 1.0  # for a status that only changes its step
FORMATS = {
    "loss": "loss {:.4f}",
    "reward": "reward {:.3g}",
    "rewards/accuracies": "accuracy {:.3g}",
    "accuracy": "accuracy {:.3g}",
    "rewards/margins": "margin {:.3g}",
    "margin": "margin {:.3g}",
    "learning_rate": "learning rate {:.2e}",
    "grad_norm": "gradient norm {:.2f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "gpu_memory_peak_gib": "GPU {:.1f} GiB",
    "host_memory_gib": "host {:.1f} GiB",
    "cost": "cost {:,.2f}",
}
ON_A_BAR = ("loss", "tokens_per_second", "mfu", "gpu_memory_peak_gib")
HELD_OUT = (
    "loss",
    "reward",
    "rewards/accuracies",
    "accuracy",
    "rewards/margins",
    "margin",
)  # for sets without bytes
PROFILE_ROWS = 40
PROFILED_STEPS = 3


class Alert(TrainerCallback):
    """Records an event `alert` when a metric crosses a bound, once per crossing; NaN crosses any bound.

    Args:
        run: the run's folder.
        metric: the metric's name in metrics.jsonl: `grad_norm` or `eval_general_loss`.
        above, below: bounds; at least one.
    """

    def __init__(
        self, run: Path, *, metric: str, above: float | None = None, below: float | None = None
    ) -> None:
        if above is None and below is None:
            raise RecipeError(f"an alert on `{metric}` needs `above` or `below`.")
        self.run = run
        self.metric = metric
        self.above = above
        self.below = below
        self.was_beyond = False
        self.known: set[str] = set()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.known |= kwargs["logs"].keys()
        value = kwargs["logs"].get(self.metric)
        if not state.is_world_process_zero or not isinstance(value, int | float):
            return
        bound = ""
        if self.above is not None and not value <= self.above:
            bound = f"above {self.above:g}"
        elif self.below is not None and not value >= self.below:
            bound = f"below {self.below:g}"
        if bound and not self.was_beyond:
            message = f"Step {state.global_step}: {self.metric} is {value:.6g}, {bound}."
            record_event(
                self.run,
                "alert",
                message,
                step=state.global_step,
                metric=self.metric,
                value=str(value),
            )
        self.was_beyond = bool(bound)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.is_world_process_zero and self.known and self.metric not in self.known:
            message = f"The alert's metric {self.metric} was never logged. Logged: {', '.join(sorted(self.known))}."
            record_event(
                self.run,
                "alert_without_metric",
                message,
                step=state.global_step,
                metric=self.metric,
            )


CALLBACKS: dict[str, type[Alert] | type[Cost]] = {"alert": Alert, "cost": Cost}


def check_callbacks(sections: list[Component]) -> None:
    """Refuse callbacks of `monitoring.callbacks` that do not exist or do not accept their options."""
    for number, section in enumerate(sections):
        key = f"monitoring.callbacks[{number}]"
        factory = with_key(f"{key}.name", partial(find, "callback", section.name, CALLBACKS))
        if not isinstance(factory, type):
            check_options(factory, section.options, key)
            continue
        if not issubclass(factory, TrainerCallback):
            raise RecipeError(
                f"`{key}.name`: {section.name} is not a subclass of transformers.TrainerCallback."
            )
        refuse_unusable(factory, f"{key}.name", section.name)
        is_ours = section.name in CALLBACKS
        check_options(
            constructor_of(factory), section.options, key, passed=("run",) if is_ours else ()
        )
        if is_ours:
            with_key(key, partial(CALLBACKS[section.name], Path(), **section.options))


NEEDS_TRAINER = "it needs the trainer or a model, which a recipe cannot give it"
UNUSABLE = {
    ("transformers", "EarlyStoppingCallback"): (
        "it reads the evaluation of the Trainer, which cpt replaces. Write"
        " `evaluation.stop: {set: NAME, patience: 3}`, with the name of a held-out set"
    ),
    ("trl", "SyncRefModelCallback"): (
        "the reference is always the model that the run started from. Remove it"
    ),
    **dict.fromkeys(
        (("trl", "LogCompletionsCallback"), ("trl", "WeaveCallback"), ("trl", "WinRateCallback")),
        f"{NEEDS_TRAINER}. Write `evaluation.prompts`, or `training.log_completions` in a stage that"
        " samples",
    ),
    ("trl", "BEMACallback"): (
        "checkpoints do not have its average, so that a resumed run would begin another one. Write"
        " `checkpoints.average`"
    ),
    ("trl", "MergeModelCallback"): (
        "it writes into checkpoints, which are sealed. Merge after the run: cpt merge"
    ),
}
"""Package and class of callbacks that cannot work in a run, and what to do instead."""


def refuse_unusable(kind: type[TrainerCallback], key: str, name: str) -> None:
    """Refuse callbacks of Hugging Face that need what cpt replaces; also their subclasses."""
    for base in kind.__mro__:
        reason = UNUSABLE.get((base.__module__.partition(".")[0], base.__name__))
        if reason is not None:
            raise RecipeError(f"`{key}`: {name} would not work: {reason}.")


def constructor_of(kind: type) -> Callable[..., None]:
    """Return the constructor with all parameters as keywords: options of a class need no `*`."""
    constructor: Any = update_wrapper(partial(kind), vars(kind).get("__init__", kind))
    constructor.__name__ = kind.__name__
    parameters = inspect.signature(kind).parameters.values()
    by_keyword = []
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            parameter = parameter.replace(kind=parameter.KEYWORD_ONLY)
        by_keyword.append(parameter)
    constructor.__signature__ = inspect.Signature(by_keyword)
    return constructor  # type: ignore[no-any-return]


def build_callbacks(
    sections: list[Component], run: Path, tokens_per_step: int
) -> list[TrainerCallback]:
    """Build the recipe's callbacks, in its order; RecipeError if one cannot be constructed."""
    built: list[TrainerCallback] = []
    for number, section in enumerate(sections):
        factory: Any = find("callback", section.name, CALLBACKS)
        if section.name in CALLBACKS:
            built.append(factory(run, **section.options))
            continue
        try:
            is_class = isinstance(factory, type)
            if is_class:
                callback = factory(**section.options)
            else:
                callback = Watch(factory, section.options, run, tokens_per_step)
        except CptError:
            raise
        except Exception as problem:
            raise RecipeError(
                f"`monitoring.callbacks`: {section.name} cannot be constructed: {type(problem).__name__}: {problem}"
            ) from problem
        base = StatefulCallback if isinstance(callback, ExportableState) else GuardedCallback
        # A new class each: transformers warns about two callbacks of one class, and names states by it.
        earlier = sum(other.name == section.name for other in sections[:number])
        name = f"{section.name} {earlier + 1}" if earlier else section.name
        kind: type[GuardedCallback] = type(name, (base,), {})
        built.append(kind(callback, section.name, run))
    return built


class Watch(TrainerCallback):
    """Calls a function with each log's metrics on the main process; a returned message becomes an event `alert`."""

    def __init__(
        self, watch: Callable[..., Any], options: Mapping[str, Any], run: Path, tokens_per_step: int
    ) -> None:
        self.watch = watch
        self.options = options
        self.run = run
        self.tokens_per_step = tokens_per_step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        metrics = {}
        for name, value in kwargs["logs"].items():
            if isinstance(value, int | float):
                metrics[name] = float(value)
        metrics |= {
            "step": float(state.global_step),
            "tokens": float(state.global_step * self.tokens_per_step),
        }
        sentence = self.watch(metrics, **self.options)
        if sentence is not None and not isinstance(sentence, str):
            raise TypeError(f"expected a message (str) or None, got {type(sentence).__name__}")
        if sentence:
            record_event(self.run, "alert", sentence, step=state.global_step)


class GuardedCallback(TrainerCallback):
    """Forwards events to a callback. If the callback fails, records an event and pauses it for `pause_seconds`."""

    kind = "callback_failed"
    errors: type[Exception] = Exception
    pause_seconds = math.inf

    def __init__(self, callback: TrainerCallback, name: str, run: Path) -> None:
        self.callback = callback
        self.name = name
        self.run = run
        self.has_failed = False
        self.paused_until = -math.inf
        for event in EVENTS:
            if getattr(type(callback), event) is not getattr(TrainerCallback, event):
                setattr(self, event, partial(self.pass_on, event))

    def pass_on(
        self,
        event: str,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> TrainerControl | None:
        is_last_chance = event == "on_train_end" and self.pause_seconds < math.inf
        if time.monotonic() < self.paused_until and not is_last_chance:
            return None
        logs: dict[str, Any] = kwargs.get("logs") or {}
        before = dict(logs)
        started = time.monotonic()
        try:
            answer: TrainerControl | None = getattr(self.callback, event)(
                args, state, control, **kwargs
            )
            for name, value in logs.items():
                if not isinstance(value, LOGGED):
                    raise TypeError(
                        f"the metric `{name}` is a {type(value).__name__}, not a number or text"
                    )
        except CptError:
            raise
        except self.errors as problem:
            logs.clear()
            logs.update(before)
            self.pause(event, problem, state.global_step, time.monotonic() - started)
            return None
        self.has_failed = self.has_failed and event != "on_log"
        return answer

    def pause(self, event: str, problem: Exception, step: int, seconds: float) -> None:
        """Pause after a call that failed after this many seconds."""
        self.paused_until = time.monotonic() + self.pause_seconds
        if not self.has_failed:
            text = f"`{self.name}` failed in {event} and pauses: {one_line(problem)}."
            record_event(self.run, self.kind, text, step=step)
        self.has_failed = True


def one_line(problem: Exception) -> str:
    return " ".join(f"{type(problem).__name__}: {problem}".split())


class StatefulCallback(GuardedCallback, ExportableState):
    """The same for a callback with a state, which checkpoints keep and a resumed run restores."""

    def __init__(self, callback: Any, name: str, run: Path) -> None:
        super().__init__(callback, name, run)
        self.__dict__["on_train_begin"] = self.begin_from_checkpoint

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.callback.state()  # type: ignore[attr-defined]
        return state

    def begin_from_checkpoint(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        restore_state(self.callback, state, type(self).__name__)
        return self.pass_on("on_train_begin", args, state, control, **kwargs)


def order_of(callback: TrainerCallback) -> int:
    order: int = getattr(type(callback), "order", 0)
    return order


def guard_trackers(trainer: Trainer, run: Path) -> None:
    """Replace Hugging Face's trackers by ones whose errors do not end the run."""
    kinds: tuple[type[TrainerCallback], ...] = tuple(INTEGRATION_TO_CALLBACK.values())
    for callback in list(trainer.callback_handler.callbacks):
        if isinstance(callback, kinds):
            trainer.remove_callback(callback)
            trainer.add_callback(Tracker(callback, type(callback).__name__, run))


def usable_trackers(names: Sequence[str]) -> list[str]:
    """The trackers whose packages can be imported; an event for each of the others, without which the run trains."""
    usable = []
    for name in names:
        try:
            INTEGRATION_TO_CALLBACK[name]()
        except Exception as problem:  # whatever importing it raises
            text = f"The run trains without `{name}`: {one_line(problem)}."
            log.warning(text, extra={"event": Tracker.kind})
        else:
            usable.append(name)
    return usable


class Tracker(GuardedCallback):
    """A tracker that pauses for a minute after errors, such as a full disk or a lost network, and then retries.

    A call that waits long for its server is followed by a longer pause.
    """

    order = TRACKERS  # Hugging Face calls them first, before others add metrics
    kind = "tracker_failed"
    pause_seconds = SECONDS_BETWEEN_TRIES

    def pause(self, event: str, problem: Exception, step: int, seconds: float) -> None:
        """TensorBoard's writer thread dies on an error; the next log creates another."""
        super().pause(event, problem, step, seconds)
        self.paused_until = max(self.paused_until, time.monotonic() + seconds / SHARE_OF_TRIES)
        if isinstance(self.callback, TensorBoardCallback):
            self.callback.tb_writer = None


class MetricsFile(TrainerCallback):
    """Appends each log to a file; if the disk is full, retries later."""

    def __init__(self, path: Path, tokens_per_step: int) -> None:
        self.path = path
        self.tokens_per_step = tokens_per_step
        self.lines = LinesFile(path)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Remove lines after the checkpoint's step, so that no step is in the file twice."""
        # transformers reads a resumed run's intervals from trainer_state.json; the recipe may have changed them.
        state.compute_steps(args, state.max_steps)
        if not state.is_world_process_zero:
            return
        step = state.global_step or -1  # a fresh start keeps none
        self.lines.waiting = [line for line in self.lines.waiting if is_until(line, step)]
        try:
            keep_lines_until(self.path, step)
        except OSError as problem:
            log.warning(
                "%s cannot be changed: %s. It may contain some steps twice.",
                self.path,
                problem.strerror,
            )

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            tokens = state.global_step * self.tokens_per_step
            self.lines.add(
                json.dumps({"step": state.global_step, "tokens": tokens, **kwargs["logs"]})
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.lines.write_waiting()

    on_train_end = on_step_end


class StatusFile(TrainerCallback):
    """Writes the status at logs and saves, and retries events that a full disk refused."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.written = -math.inf

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if time.monotonic() - self.written >= SECONDS_BETWEEN_WRITES:
            self.on_save(args, state, control)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        write_waiting_events(self.run.folder)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Update the status; the save may have failed, or may still run in the background."""
        self.written = time.monotonic()
        saved = published_checkpoints(self.run.folder)
        checkpoint = {"checkpoint": saved[-1].name} if saved else {}
        self.run.write_status(
            "running", step=state.global_step, steps=state.max_steps, **checkpoint
        )


class ConsoleProgress(TrainerCallback):
    """Shows the run's progress, from the main process: a bar with the newest metrics on a terminal, else one line per
    log. Evaluations are always lines. It runs after the callbacks that add metrics."""

    def __init__(self, name: str, console: Console | None = None) -> None:
        self.name = name
        self.console = console or open_console()
        self.progress: Progress | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.is_world_process_zero and self.console.is_interactive:
            columns = (
                BarColumn(20),
                MofNCompleteColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
            )
            description = TextColumn("{task.description}")
            metrics = TextColumn("{task.fields[metrics]}")
            self.progress = Progress(description, *columns, metrics, console=self.console)
            self.task = self.progress.add_task(
                self.name, total=state.max_steps, completed=state.global_step, metrics=""
            )
            self.progress.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.progress:
            self.progress.update(self.task, completed=state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        line = describe_logs(kwargs["logs"])
        if self.progress and "loss" in kwargs["logs"]:
            self.progress.update(self.task, metrics=describe_logs(kwargs["logs"], ON_A_BAR))
        elif state.is_world_process_zero and line:
            step = f"step {state.global_step}/{state.max_steps}"
            seconds = kwargs["logs"].get("seconds_to_go")
            if seconds:
                step += f"  {format_duration(seconds)} to go"
            with suppress(OSError):  # output to a full disk, or a closed terminal
                self.console.print(f"{self.name}  {step}  {line}", highlight=False, soft_wrap=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.progress:
            self.progress.stop()


def describe_logs(logs: dict[str, Any], names: Iterable[str] = FORMATS) -> str:
    """Format one log's metrics as a line; empty for the Trainer's final summary."""
    if "loss" in logs:
        logged = [name for name in names if logs.get(name) is not None]  # such as a reward
        return "  ".join(FORMATS[name].format(logs[name]) for name in logged)
    keys = []
    for key in logs:
        if key.startswith("eval_"):
            keys.append(key.removeprefix("eval_"))
    ends = ("_loss", "_examples")  # rewards of generated answers come without a loss
    sets: list[str] = []
    for name in dict.fromkeys(
        key.removesuffix(end) for key in keys for end in ends if key.endswith(end)
    ):
        if f"{name}_bits_per_byte" in keys:
            sets.append(f"{name} {logs[f'eval_{name}_bits_per_byte']:.4f} bits per byte")
        else:
            metrics = []
            for metric in HELD_OUT:
                if f"{name}_{metric}" in keys:
                    metrics.append(FORMATS[metric].format(logs[f"eval_{name}_{metric}"]))
            sets.append(f"{name} {' '.join(metrics)}")
    if sets:
        return f"held out: {', '.join(sets)}"
    return ""


class StepProfile(TrainerCallback):
    """Profiles three steps of the main process from `at_step` on, counted from 1; the step before is a warm-up."""

    def __init__(self, run: Path, at_step: int) -> None:
        self.run = run
        self.first = at_step
        self.last = at_step + PROFILED_STEPS - 1
        self.file = run / PROFILE / f"steps-{self.first}-{self.last}.txt"
        self.profiler: profile | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start at the step before the first one, or at the run's first step."""
        if (
            state.is_world_process_zero
            and self.profiler is None
            and state.global_step + 1 == max(1, self.first - 1)
        ):
            activities = [ProfilerActivity.CPU] + [
                ProfilerActivity.CUDA
            ] * torch.cuda.is_available()
            warmup = min(1, self.first - 1)
            schedule = torch.profiler.schedule(
                wait=0, warmup=warmup, active=PROFILED_STEPS, repeat=1
            )
            self.profiler = profile(activities=activities, schedule=schedule)
            self.profiler.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.profiler is None:
            return
        if state.global_step < self.last:
            self.profiler.step()
            return
        profiler = self.profiler
        self.profiler = None
        profiler.stop()
        trace = self.file.with_suffix(".json.gz")
        order = f"self_{args.device.type}_time_total"
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            table = profiler.key_averages().table(
                sort_by=order, row_limit=PROFILE_ROWS, max_name_column_width=80
            )
            self.file.write_text(table)
        except (OSError, RuntimeError) as problem:  # a full disk
            log.warning("The profile cannot be written: %s.", problem)
            return
        self.report(
            "profile", f"profiled: {trace} (open it in ui.perfetto.dev) and {self.file.name}"
        )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Report if the run resumed after these steps, or ended before the last one."""
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None
        if state.is_world_process_zero and not self.file.exists():
            self.report(
                "profile_left_out", "not profiled: the run started after them or ended before"
            )

    def report(self, kind: str, text: str) -> None:
        record_event(self.run, kind, f"Steps {self.first} to {self.last}: {text}.", step=self.first)


def check_profiled_steps(at_step: int | None, steps: int) -> None:
    if at_step is not None and (last := at_step + PROFILED_STEPS - 1) > steps:
        raise RecipeError(
            f"`monitoring.profile`: the last profiled step is {last}, but the run has {steps}."
        )
