"""Faults inside the steps of any Trainer, and a record of what each step read: the same for ours and for the plain
one.

CPT_FAULTS is a JSON list of faults: `kind` and when: `steps` (from 1 on), `documents` (hashes of rows), `above` (rows
in a micro-batch), `rank`. Kinds: nan, spike, memory (none left in the forward), error, worker (a worker process of the
data loader is killed), pause (`seconds`). CPT_FAULTS_SAMPLES is the file of the record, with the rank behind its name.
"""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from xxhash import xxh3_64_hexdigest

FAULTS, SAMPLES, ATTEMPT = "CPT_FAULTS", "CPT_FAULTS_SAMPLES", "CPT_FAULTS_ATTEMPT"
RESTARTS = ("CPT_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
Fault = Mapping[str, Any]


class InjectedFaults(Trainer):
    """A Trainer whose steps go wrong around the loss, where a user's own code would have it."""

    killed_workers = False

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        """A step begins."""
        self.note({"begin": True})
        return super().get_batch_samples(*arguments, **options)

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """The loss, or what a fault makes of it."""
        if not model.training:
            return super().compute_loss(model, inputs, *arguments, **options)
        documents = [xxh3_64_hexdigest(row.cpu().numpy()) for row in inputs["input_ids"]]
        due = {
            fault["kind"]: fault
            for fault in json.loads(os.environ.get(FAULTS, "[]"))
            if self.is_due(fault, documents)
        }
        self.go_wrong(due)
        loss: Any = super().compute_loss(model, inputs, *arguments, **options)
        factor = float("nan") if "nan" in due else 1e4 if "spike" in due else 1.0
        self.note(
            {"documents": documents, "loss": (float(loss.detach()) / self.args.world_size).hex()}
        )  # the Trainer multiplies by it
        return loss * factor

    def go_wrong(self, due: Mapping[str, Fault]) -> None:
        """What happens before the loss."""
        if "pause" in due:
            time.sleep(due["pause"]["seconds"])
        if "error" in due:
            raise ValueError("something of the user's own (injected)")
        if "memory" in due:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB (injected)"
            )
        if "worker" in due and not self.killed_workers:
            self.killed_workers = True
            for worker in multiprocessing.active_children()[:1]:
                os.kill(worker.pid or 0, signal.SIGKILL)

    def is_due(self, fault: Fault, documents: list[str]) -> bool:
        """Whether it is this fault's turn."""
        step = self.state.global_step + 1
        here = fault.get(
            "rank", self.args.process_index
        ) == self.args.process_index and step in fault.get("steps", [step])
        poisoned = "documents" not in fault or not set(fault["documents"]).isdisjoint(documents)
        return here and poisoned and len(documents) > fault.get("above", 0)

    def note(self, what: Mapping[str, Any]) -> None:
        """One line of the record, in one write: a kill leaves whole lines."""
        if SAMPLES in os.environ:
            restarts = max(int(os.environ.get(name, "0")) for name in RESTARTS)
            attempt = [int(os.environ.get(ATTEMPT, "0")), restarts]
            line = {
                "time": time.monotonic(),
                "attempt": attempt,
                "step": self.state.global_step + 1,
                **what,
            }
            with Path(f"{os.environ[SAMPLES]}-{self.args.process_index}.jsonl").open(
                "ab", buffering=0
            ) as file:
                file.write(f"{json.dumps(line)}\n".encode())
