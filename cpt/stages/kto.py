"""Kahneman-Tversky optimisation (arXiv 2402.01306): answers that were each judged good or bad; TRL's trainer on our
rows."""

from typing import Any

import trl

from cpt.stages.examples import ExampleTrainer
from cpt.stages.model import reference_model
from cpt.stages.trainer import builder

CONFIG = trl.KTOConfig
COLUMNS = ("prompt", "completion", "label")


class KTOTrainer(ExampleTrainer, trl.KTOTrainer):  # type: ignore[misc]
    """TRL's KTOTrainer as a run of ours."""

    def collate_examples(self) -> Any:
        """TRL's collator; the KL term is taken of prompts with the answer of the row before, which TRL puts into the
        rows ahead of time."""
        collate = self.data_collator
        if not self.calculate_KL:
            return collate

        def with_others(examples: list[dict[str, Any]]) -> Any:
            answers = [example["completion_ids"] for example in examples]
            mismatched = [answers[-1], *answers[:-1]]
            return collate(
                [{**one, "KL_completion_ids": other} for one, other in zip(examples, mismatched, strict=True)]
            )

        return with_others


# The reference is the model as the run found it.
build_trainer = builder(KTOTrainer, ref_model=reference_model)
