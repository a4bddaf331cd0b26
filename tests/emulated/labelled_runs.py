"""Real runs of `train()` on a labelled GPU, with the host's waits of each step."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emulated_gpu import Wait
from labelled_devices import OneDevicePerOperation
from transformers import TrainerCallback

from cpt.recipe.load import load_recipe


@dataclass
class CountedWaits(TrainerCallback):
    """Says which step and which micro-batch runs, so that each wait is counted for it."""

    operations: OneDevicePerOperation
    trainer: Any = None

    def attach(self, trainer: Any) -> None:
        self.trainer = trainer
        gpu, step_of_trainer = self.operations.gpu, trainer.training_step

        def training_step(*arguments: Any, **options: Any) -> Any:
            gpu.micro_batch = self.index
            self.index += 1
            try:
                return step_of_trainer(*arguments, **options)
            finally:
                gpu.micro_batch = None

        trainer.training_step = training_step
        begin = trainer.guard.begin_step

        def begin_step() -> None:
            gpu.step += 1
            self.index = 0
            begin()

        trainer.guard.begin_step = begin_step

    def waits_of(self, step: int) -> list[Wait]:
        return [wait for wait in self.operations.gpu.waits if wait.step == step]
