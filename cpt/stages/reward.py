"""Reward models: a score for each answer, trained to be higher for the chosen of two (Bradley-Terry); TRL's trainer on
our rows."""

from typing import Any

import trl
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.models.scoring import scoring_model
from cpt.recipe.schema import Recipe
from cpt.stages.arguments import weights_dtype
from cpt.stages.examples import ExampleTrainer
from cpt.stages.trainer import builder

CONFIG = trl.RewardConfig
COLUMNS = ("prompt", "chosen", "rejected")


class RewardTrainer(ExampleTrainer, trl.RewardTrainer):  # type: ignore[misc]
    """TRL's RewardTrainer as a run of ours."""

    def collate_examples(self) -> Any:
        """TRL's collator, of whole dialogues."""
        collate, most = self.data_collator, self.recipe.data.sequence_length

        def whole(examples: list[dict[str, Any]]) -> Any:
            return collate(
                [
                    {name: (one["prompt_ids"] + one[name])[:most] for name in ("chosen_ids", "rejected_ids")}
                    for one in examples
                ]
            )

        return whole


def model_for(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, arguments: trl.RewardConfig
) -> PreTrainedModel | PeftModel:
    """The recipe's model with a new head for one score in place of the language model's."""
    return scoring_model(recipe.model, tokenizer, seed=recipe.seed, dtype=weights_dtype(recipe, arguments))


build_trainer = builder(RewardTrainer)
