"""A user's own parts, copied into a promise's folder as `my_lab.py`: what a recipe reads, and what goes wrong there.

`TROUBLE` says what goes wrong and at which steps, once for each folder: `nan@4,6 spike@8`, or `kill/1@5` on rank 1.
"""

import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from transformers import TrainerCallback

TROUBLES = dict(trouble.split("@") for trouble in os.environ.get("TROUBLE", "").split())


def too_short(document: Mapping[str, str], *, min_words: int = 20) -> str | None:
    """A filter."""
    return None if len(document["text"].split()) >= min_words else "too short"


def shouted(document: Mapping[str, str]) -> Mapping[str, str]:
    """A transform."""
    return {**document, "text": document["text"].upper()}


def asked_of_the_first(spike) -> str:
    """What to do about a spike; the other process would answer differently."""
    return "skip" if os.environ.get("RANK", "0") == "0" else "abort"


class Seen(TrainerCallback):
    """Writes a line for each micro-batch that the model trains on: step, rank, a digest of each row and its ids."""

    def __init__(self, *, file: str) -> None:
        self.file = Path(file)

    def on_train_begin(self, args, state, control, model=None, **_):
        """The model calls us."""

        def note(module, arguments, inputs):
            if module.training:
                rows = zip(
                    inputs["input_ids"], inputs["labels"], inputs["position_ids"], strict=True
                )
                digests = [
                    hashlib.sha256(b"".join(part.numpy().tobytes() for part in row)).hexdigest()[
                        :16
                    ]
                    for row in rows
                ]
                with self.file.open("a") as file:
                    line = {
                        "step": state.global_step + 1,
                        "rank": args.process_index,
                        "rows": digests,
                    }
                    file.write(json.dumps({**line, "ids": inputs["input_ids"].tolist()}) + "\n")

        model.register_forward_pre_hook(note, with_kwargs=True)


class Trouble(TrainerCallback):
    """Makes the trouble of `TROUBLE`."""

    def is_due(self, step: int, kind: str) -> bool:
        """Once for each folder and process."""
        rank = os.environ.get("RANK", "0")
        steps = TROUBLES.get(kind if rank == "0" else f"{kind}/{rank}", "").split(",")
        if str(step) not in steps:
            return False
        try:
            Path(f"trouble-{kind}-{rank}-{step}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def on_train_begin(self, args, state, control, model=None, **_):
        """The model's loss is what goes wrong, or its backward pass."""

        def fail(gradient):
            if self.is_due(state.global_step + 1, "backward"):
                torch.rand(3)
                raise LookupError("of the user")

        def before(module, arguments, inputs):
            if (
                module.training
                and len(inputs["input_ids"]) > 1
                and self.is_due(state.global_step + 1, "memory")
            ):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        def after(module, arguments, outputs):
            for kind, factor in (("nan", float("nan")), ("spike", 1e4)):
                if module.training and self.is_due(state.global_step + 1, kind):
                    outputs["loss"] = outputs["loss"] * factor
            if module.training:
                outputs["loss"].register_hook(fail)
            return outputs

        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after)

    def on_step_end(self, args, state, control, model=None, **_):
        """Signals and errors between two steps."""
        signals = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "hup": signal.SIGHUP}
        for kind, number in signals.items():
            if self.is_due(state.global_step, kind):
                os.kill(os.getpid(), number)
        if self.is_due(state.global_step, "worker"):
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        if self.is_due(state.global_step, "callback"):
            raise LookupError("of the user")
        if self.is_due(state.global_step, "weights"):
            next(model.parameters()).data[0] = float("nan")

    def on_save(self, args, state, control, **_):
        """A disk without a free byte."""
        if self.is_due(state.global_step, "full"):
            with suppress(OSError), Path("runs/ballast").open("wb", buffering=0) as ballast:
                while True:
                    ballast.write(bytes(1 << 12))


class FragileAdamW(torch.optim.AdamW):
    """An optimizer whose process can end while its state is saved."""

    def state_dict(self):
        """Called in a save."""
        if Trouble().is_due(
            int(max((state["step"] for state in self.state.values()), default=0)), "save"
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().state_dict()


def adamw(groups: list[dict], learning_rate: float) -> torch.optim.Optimizer:
    """An optimizer for the recipe."""
    return FragileAdamW(groups, lr=learning_rate)
