"""Evaluate the recipe's tasks during training: another process loads the weights of a step from the run's folder."""

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.cache import size_of
from cpt.checkpoints.resume import step_of
from cpt.checkpoints.retention import published_in
from cpt.checkpoints.save import PREFIXES, Checkpointer
from cpt.distributed import environment_alone, main_process_decides
from cpt.errors import Interrupted, RecipeError
from cpt.files import LinesFile, parse_object
from cpt.process import Child
from cpt.recipe.schema import Evaluation
from cpt.runs.events import record_event
from cpt.runs.folder import METRICS, TASK, read_objects
from cpt.training.arguments import RunLength

log = logging.getLogger("cpt")
PROGRAM = Path(__file__).resolve().parents[1] / "evaluation" / "evaluate.py"
PREFIX = PREFIXES["tasks"]  # of folders with weights that are removed after their evaluation
OUTPUT = "tasks.log"  # of the last evaluation
LONGEST_SECONDS = 2 * 3600  # for one evaluation
MOST_WAITING = 8  # weights of steps
LEAST_FREE = 10  # free disk space, as a multiple of one step's weights
SECONDS_BETWEEN_LOOKS = 0.5  # while training waits


class TaskEvaluations(TrainerCallback):
    """Evaluates one step after the other. An evaluation that fails is an event.

    The main process starts the evaluations and reads their results, between two steps. Training draws no random
    number for them. A resumed run evaluates the steps whose weights remain.

    Args:
        folder: of the run.
        device: of the training.
        checkpointer: writes the weights.
        check_signals: called while training waits; raises Interrupted on all processes.
        report: called with the scores, and `tasks/step`.
    """

    def __init__(
        self,
        folder: Path,
        evaluation: Evaluation,
        length: RunLength,
        *,
        device: torch.device,
        checkpointer: Checkpointer,
        check_signals: Callable[[], None],
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self.folder = folder
        self.evaluation = evaluation
        self.length = length
        self.device = device
        self.checkpointer = checkpointer
        self.check_signals = check_signals
        self.report = report
        self.first_step = 0  # the run's, or the checkpoint's from which it resumes
        self.child: Child | None = None
        self.weights = Path()  # that the child evaluates
        self.ends = 0.0  # when the child is killed, on a monotonic clock
        self.waiting: list[Path] = []

    def is_due(self, step: int) -> bool:
        every = self.length.steps_between(self.evaluation.tasks_every_tokens, None)
        return every is not None and step > 0 and step % every == 0

    def on_published(self, published: Path, step: int) -> None:
        """Keep a checkpoint of a due step until it is evaluated, without a copy if the file system has hard links."""
        target = published.with_name(f"{PREFIX}{step}")
        if self.is_due(step) and not target.exists():
            try:
                shutil.copytree(published, target, copy_function=os.link)
            except OSError:
                with suppress(OSError):  # a full disk: then the evaluation fails
                    shutil.copytree(published, target, dirs_exist_ok=True)

    @property
    def on_own_gpu(self) -> bool:
        """Whether evaluations run on the main process's GPU, while training waits."""
        return self.evaluation.tasks_device == "auto" and self.device.type == "cuda"

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.first_step = state.global_step
        device = self.evaluation.tasks_device.removeprefix("cuda:")
        if device.isdigit() and int(device) >= torch.cuda.device_count():
            raise RecipeError(
                f"`evaluation.tasks_device`: this machine has {torch.cuda.device_count()} GPUs."
            )
        if not state.is_world_process_zero:
            return
        self.lines = LinesFile(self.folder / METRICS)
        lines = read_objects(self.folder / METRICS)
        done = {line.get("step") for line in lines if has_scores(line)}
        waiting = []
        for weights in published_in(self.folder, PREFIX):
            if weights.step <= state.global_step and weights.step not in done:
                waiting.append(weights.folder)
        self.waiting = waiting
        for path in {*self.folder.glob(f"{PREFIX}*")} - {*self.waiting}:
            shutil.rmtree(path, ignore_errors=True)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The weights of the last step are published, or being written in the background."""
        step = state.global_step
        if state.is_world_process_zero:
            self.add(step)
        if self.on_own_gpu and (self.is_due(step) or step == self.first_step):
            self.wait(control)
        else:
            self.advance()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.is_world_process_zero:
            self.add(state.global_step)
        self.wait(control)

    def add(self, step: int) -> None:
        """Put a due step into the queue; the oldest in it are skipped if there are many, or the disk gets full."""
        if not self.is_due(step) or step == self.first_step:
            return
        free_bytes = shutil.disk_usage(self.folder).free
        largest_bytes = max(map(size_of, self.waiting), default=0)
        is_full = free_bytes < LEAST_FREE * largest_bytes
        while self.waiting and (is_full or len(self.waiting) >= MOST_WAITING):
            weights = self.waiting.pop(0)
            text = f"The tasks of step {step_of(weights)} are skipped, because those of step {step} are due."
            record_event(self.folder, "tasks_skipped", text, step=step_of(weights))
            shutil.rmtree(weights, ignore_errors=True)
        self.waiting.append(self.folder / f"{PREFIX}{step}")

    def wait(self, control: TrainerControl) -> None:
        """Wait for all evaluations, on all processes, with heartbeats and signals as in the Trainer's evaluation."""
        self.checkpointer.wait()
        try:
            while True:
                self.check_signals()
                if not main_process_decides(self.is_busy):
                    return
        except Interrupted:
            control.should_save = control.should_training_stop = True
            self.close()

    def is_busy(self) -> bool:
        is_busy = self.advance()
        if self.child is not None:
            with suppress(subprocess.TimeoutExpired):
                self.child.wait(SECONDS_BETWEEN_LOOKS)
        return is_busy

    def advance(self) -> bool:
        """Read the result of an evaluation that has ended, start the next one, and return whether there is one."""
        try:
            if self.child is not None and (
                self.child.poll() is not None or time.monotonic() > self.ends
            ):
                self.read_result()
            if self.child is None and self.waiting and not self.checkpointer.is_writing:
                self.weights = self.waiting.pop(0)
                self.start()
        except Exception as problem:  # of the system or a tracker: training does not depend on it
            self.fail(f"{type(problem).__name__}: {problem}")
        return self.child is not None or bool(self.waiting)

    def start(self) -> None:
        # Without PYTHONSAFEPATH, Python would import modules from the program's folder first.
        environment = {"CUDA_VISIBLE_DEVICES": self.visible_gpu(), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, str(PROGRAM), str(self.weights)]
        with (self.folder / OUTPUT).open("wb") as output:
            self.child = Child(
                command, environment=environment, inherits=environment_alone(), output=output
            )
        self.ends = time.monotonic() + LONGEST_SECONDS

    def visible_gpu(self) -> str:
        """The GPU of the evaluation, as CUDA_VISIBLE_DEVICES names it; empty for the CPU."""
        number = self.evaluation.tasks_device.removeprefix("cuda:")
        if self.on_own_gpu:
            torch.cuda.empty_cache()
            number = str(torch.cuda.current_device())
        if not number.isdigit():
            return ""
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        return visible[int(number)] if visible else number

    def read_result(self) -> None:
        assert self.child is not None, "the caller checked it"
        child = self.child
        self.child = None
        late = f"killed after {LONGEST_SECONDS:,} s, " if child.poll() is None else ""
        child.kill_family()
        output = (self.folder / OUTPUT).read_text(errors="replace")
        lines = output.strip().splitlines()
        last_line = lines[-1] if lines else ""
        scores = parse_object(last_line.encode()) if child.returncode == 0 else None
        if scores is None:
            self.fail(f"{late}exit code {child.returncode}: {last_line}")
            return
        shutil.rmtree(self.weights, ignore_errors=True)
        step = step_of(self.weights)
        line = {"step": step, "tokens": step * self.length.tokens_per_step, **scores}
        self.lines.add(json.dumps(line))
        listing = ", ".join(f"{name} {score:.4g}" for name, score in scores.items())
        log.info(f"Tasks of step {step}: {listing}")
        self.report({**scores, f"{TASK}step": step})

    def fail(self, reason: str) -> None:
        text = f"The tasks of step {step_of(self.weights)} were not evaluated: {reason}. See {OUTPUT} of the run."
        record_event(self.folder, "tasks_failed", text, step=step_of(self.weights))
        shutil.rmtree(self.weights, ignore_errors=True)

    def close(self) -> None:
        """End the evaluation; its weights remain for the next start."""
        if self.child is not None:
            self.child.kill_family()
        self.child = None
        self.waiting = []


def has_scores(line: dict[str, Any]) -> bool:
    return any(name.startswith(TASK) for name in line)
