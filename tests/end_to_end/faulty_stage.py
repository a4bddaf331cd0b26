"""A user's own stage: pre-training whose steps go wrong as the variable CPT_TEST_FAULTS says.

Each fault is a dict: `kind` (nan, spike, memory) and when: `steps` (from 1 on),
`rows` (global numbers), `above` (rows in a micro-batch), `rank`.
"""

import json
import os

import torch
from transformers import TrainingArguments

from cpt.distributed import rank
from cpt.training.trainer import CPTTrainer


def only_main_decides(spike):
    """A recovery handler that another process would answer differently."""
    return "skip" if rank() == 0 else "abort"


CONFIG = TrainingArguments
COLUMNS = ("text",)


def build_trainer(recipe, model, tokenizer, data, arguments, length):
    return FaultyTrainer(
        recipe, model, arguments, rows=data.rows, length=length, held_out=data.held_out, tokenizer=tokenizer
    )


class FaultyTrainer(CPTTrainer):
    """Its faults are where a user's own code would have them: around the loss."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.faults = json.loads(os.environ.get("CPT_TEST_FAULTS", "[]"))

    def compute_loss(self, model, inputs, *arguments, **options):
        faults = [fault for fault in self.faults if model.training and self.is_due(fault, inputs)]
        kinds = {fault["kind"] for fault in faults}
        if "memory" in kinds:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")
        loss = super().compute_loss(model, inputs, *arguments, **options)
        if "nan" in kinds:
            loss = loss * float("nan")
        if "spike" in kinds:
            loss = loss * 1e4
        return loss

    def is_due(self, fault, inputs):
        step = self.state.global_step + 1
        if fault.get("rank", rank()) != rank() or step not in fault.get("steps", [step]):
            return False
        if len(inputs["input_ids"]) <= fault.get("above", 0):
            return False
        if "rows" in fault:
            poisoned = [self.rows[row]["input_ids"].to(inputs["input_ids"].device) for row in fault["rows"]]
            if not any(torch.equal(row, bad) for row in inputs["input_ids"] for bad in poisoned):
                return False
        return True
