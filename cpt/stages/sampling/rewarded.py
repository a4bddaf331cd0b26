"""Stages with advantages of their own: what TRL's GRPO generates and scores, and its clipped policy loss, without its
groups."""

from typing import Any

import torch
import trl
from trl.models.utils import disable_gradient_checkpointing

from cpt.ranks import world_size
from cpt.stages.sampling.generation_batches import GenerationBatches

NO_GROUPS = ("scale_rewards", "multi_objective_aggregation")


class RewardedTrainer(GenerationBatches, trl.GRPOTrainer):  # type: ignore[misc]
    """GRPO up to the rewards; a stage then says what they make of advantages."""

    WITHOUT_EFFECT = NO_GROUPS
    rewards_of_all: torch.Tensor

    def _calculate_rewards(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Each reward of each completion of all processes; their weighted sums are kept, NaN where no reward
        applies."""
        found: torch.Tensor = super()._calculate_rewards(*arguments, **options)
        self.rewards_of_all = (found * self.reward_weights.to(found.device)).nansum(dim=1)
        self.rewards_of_all[found.isnan().all(dim=1)] = torch.nan
        return found

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """A generation, in training with advantages of the stage's own."""
        made: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.model is not None and self.model.training:
            made |= self.advantages_of(inputs, made)
        return made

    def advantages_of(self, inputs: list[dict[str, Any]], made: dict[str, Any]) -> dict[str, Any]:
        """`advantages` ([B], or [B, T] for each token), and what else the loss of a completion needs."""
        raise NotImplementedError

    @property
    def generating(self) -> tuple[Any, Any]:
        """The model, and how it recomputes activations, which is of no use without gradients."""
        return self.model, self.args.gradient_checkpointing_kwargs

    @property
    def own_rewards(self) -> torch.Tensor:
        """Those of this process."""
        size = len(self.rewards_of_all) // self.args.world_size
        return self.rewards_of_all[self.args.process_index * size :][:size]

    def log_probabilities(self, made: dict[str, Any]) -> torch.Tensor:
        """Of the tokens of completions under the model as it is, [B, T]."""
        ids = torch.cat((made["prompt_ids"], made["completion_ids"]), dim=1)
        mask = torch.cat((made["prompt_mask"], made["completion_mask"]), dim=1)
        model, how = self.generating
        with torch.no_grad(), disable_gradient_checkpointing(model, how):
            size = self.args.per_device_train_batch_size
            found, _, _ = self._get_per_token_logps_and_entropies(
                model, ids, mask, made["completion_ids"].size(1), batch_size=size
            )
        logps: torch.Tensor = found
        return logps

    def note_figure(self, name: str, value: float) -> None:
        """For the log: means over what is noted until then."""
        self._metrics["train"][name].append(value)


def single_answers(config: Any) -> int:
    """What GRPOConfig is shown in place of 1 answer to each prompt: it asks for a group to compare.

    The whole batch is one: answers to all its prompts, whose advantages are normalised together.
    """
    at_once = config.per_device_train_batch_size * world_size()
    return int(
        config.generation_batch_size or at_once * (config.steps_per_generation or config.gradient_accumulation_steps)
    )
