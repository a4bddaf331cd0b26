"""Group relative policy optimisation (arXiv 2402.03300) and its relatives, by `training.loss_type`: TRL's trainer on
our prompts."""

from collections.abc import Mapping
from typing import Any

import trl

from cpt.stages.sampling.generation_batches import GenerationBatches, reference_for
from cpt.stages.sampling.generations import prompts_of_step
from cpt.stages.trainer import builder

CONFIG = trl.GRPOConfig
COLUMNS = ("prompt",)


class GRPOTrainer(GenerationBatches, trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer as a run of ours."""

    def own_state(self) -> dict[str, Any]:
        """What an adaptive entropy bonus has learned."""
        return {"entropy": [self.entropy_coef, self._last_world_entropy]} if self.use_adaptive_entropy else {}

    def restore_own(self, state: Mapping[str, Any]) -> None:
        """Go on with it."""
        self.entropy_coef, self._last_world_entropy = state["entropy"]


def rows_of_step(training: Mapping[str, Any], rows: int) -> int:
    """Prompts in an optimizer step of so many completions."""
    return prompts_of_step(CONFIG, training, rows)


# The reference, where `beta` asks for one, is the model as the run found it.
build_trainer = builder(GRPOTrainer, reference=reference_for)
