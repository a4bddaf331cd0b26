"""REINFORCE leave-one-out (arXiv 2402.14740): TRL's trainer on our prompts."""

from collections.abc import Mapping
from typing import Any

import trl

from cpt.stages.sampling.generation_batches import GenerationBatches, reference_for
from cpt.stages.sampling.generations import prompts_of_step
from cpt.stages.trainer import builder

CONFIG = trl.RLOOConfig
COLUMNS = ("prompt",)


class RLOOTrainer(GenerationBatches, trl.RLOOTrainer):  # type: ignore[misc]
    """TRL's RLOOTrainer as a run of ours."""


def rows_of_step(training: Mapping[str, Any], rows: int) -> int:
    """Prompts in an optimizer step of so many completions."""
    return prompts_of_step(CONFIG, training, rows)


# The reference, where `beta` asks for one, is the model as the run found it.
build_trainer = builder(RLOOTrainer, reference=reference_for)
