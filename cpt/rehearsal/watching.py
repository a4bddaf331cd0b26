"""What a rehearsed part tells of itself: when each thing began and ended, how much memory each process took, and what
went wrong where."""

import json
import os
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.errors import CptError
from cpt.ranks import is_main_process, rank
from cpt.runs.record import write_json

MOMENTS, MEMORY, FAILED = "moments.jsonl", "memory-{}.json", "failed-{}.json"
LENGTH, HELD_OUT, LEFT_OUT = "length.json", "held_out.json", "left_out.json"
PLACES = {  # function of a run -> the row of the table that it belongs to
    "join_processes": "start",
    "refuse_mistakes": "start",
    "build_data": "data",
    "load_tokenizer": "model",
    "build_model": "model",
    "choose_checkpoint": "resume",
    "_load_from_checkpoint": "resume",
    "_load_optimizer_and_scheduler": "resume",
    "_load_rng_state": "resume",
    "restore_position": "resume",
    "evaluate": "evaluation",
    "continue_prompts": "evaluation",
    "write_verdict": "evaluation",
    "_save_checkpoint": "save",
    "save_once": "save",
    "export_model": "export",
    "seal_export": "export",
}


@dataclass(frozen=True)
class Failure:
    """What one process of a part failed with."""

    rank: int
    error: str
    """Name of its class."""
    message: str
    is_expected: bool
    """A CptError: the message says what to do."""
    place: str | None
    """The row of the table; None where no function of `PLACES` was under way."""
    time: float


@dataclass(frozen=True)
class Memory:
    """The most that one process took, in bytes."""

    host: int
    allocated: int = 0
    """Of the GPU, by tensors."""
    reserved: int = 0
    """Of the GPU, by torch for them."""
    of_gpu: int = 0
    """That the GPU has."""


class Measuring(TrainerCallback):
    """Writes moments (the main process) and memory (each process) into a folder, so that they are there too when a
    process is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def note(self, what: str, step: int) -> None:
        """Now."""
        write_json(self.folder / MEMORY.format(rank()), asdict(memory_of_this_process()))
        if is_main_process():
            with (self.folder / MOMENTS).open("a") as file:
                file.write(json.dumps({"what": what, "step": step, "time": time.time()}) + "\n")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """All is built, or loaded."""
        self.note("train begins", state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The first micro-batch of a step."""
        self.note("step begins", state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """An update is made."""
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.note("step ends", state.global_step)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model was measured."""
        self.note("evaluated", state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """What is behind a step's log is evaluation or save."""
        self.note("logged", state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A save has returned; in the background it may still write."""
        self.note("saved", state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """No step comes any more."""
        self.note("train ends", state.global_step)


def memory_of_this_process() -> Memory:
    """The most so far; of the host what the kernel counted since this program was started."""
    status = Path("/proc/self/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    host = int(peak[1]) * 1024 if peak else 0
    if not torch.cuda.is_initialized():
        return Memory(host)
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return Memory(host, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), total)


@contextmanager
def failures_noted(folder: Path) -> Iterator[None]:
    """Write down what leaves it, and let it go on."""
    try:
        yield
    except Exception as problem:
        remedies = [kind.__name__ for kind in type(problem).__mro__ if kind.__module__ == CptError.__module__]
        name = remedies[0] if remedies else type(problem).__name__
        failure = Failure(rank(), name, str(problem), bool(remedies), place_of(problem), time.time())
        write_json(folder / FAILED.format(f"{rank()}-{os.getpid()}"), asdict(failure))
        raise


def place_of(problem: BaseException | None) -> str | None:
    """The outermost function of `PLACES` that was under way, or of the error that this one came from."""
    while problem is not None:
        for frame, _ in traceback.walk_tb(problem.__traceback__):
            if place := PLACES.get(frame.f_code.co_name):
                return place
        problem = problem.__cause__
    return None
