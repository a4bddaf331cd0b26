"""Our pre-training stage with faults in its steps, as a stage of a user's own: `stage: benchmarks.faults.stage`."""

from typing import Any

from transformers import TrainingArguments

from benchmarks.faults.injection import InjectedFaults
from cpt.training.trainer import CPTTrainer

CONFIG = TrainingArguments
COLUMNS = ("text",)


class FaultyTrainer(InjectedFaults, CPTTrainer):
    """Ours, with faults."""


def build_trainer(
    recipe: Any, model: Any, tokenizer: Any, data: Any, arguments: Any, length: Any
) -> FaultyTrainer:
    """The trainer of this stage."""
    return FaultyTrainer(
        recipe,
        model,
        arguments,
        rows=data.rows,
        length=length,
        held_out=data.held_out,
        tokenizer=tokenizer,
    )
