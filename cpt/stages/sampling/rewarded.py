"""Stages with advantages of their own: what TRL's GRPO generates and scores, and its clipped policy loss, without its
groups."""

from dataclasses import dataclass
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from cpt.errors import RecipeError
from cpt.ranks import world_size
from cpt.recipe.schema import Recipe
from cpt.stages.sampling.generation_batches import GenerationBatches

NO_GROUPS = ("scale_rewards", "multi_objective_aggregation")


@dataclass
class SingleAnswers(GRPOConfig):  # type: ignore[misc]
    """GRPOConfig with one answer to each prompt."""

    num_generations: int | None = 1
    least_deviation: float = 0.1
    """The smallest deviation that advantages are divided by. Where all answers are right, what is left of them is the
    error of the values; made as large as any other, it would unlearn the answers."""

    def __post_init__(self) -> None:
        answers = self.num_generations
        if answers == 1:  # GRPOConfig asks for a group to compare: the whole batch, normalised together
            steps = self.steps_per_generation or self.gradient_accumulation_steps
            at_once = self.per_device_train_batch_size * world_size()
            self.num_generations = int(self.generation_batch_size or at_once * steps)
        super().__post_init__()
        self.num_generations = answers


class RewardedTrainer(GenerationBatches, GRPOTrainer):  # type: ignore[misc]
    """GRPO up to the rewards; a stage then says what they make of advantages."""

    rewards_of_all: torch.Tensor

    def __init__(self, recipe: Recipe, *arguments: Any, **options: Any) -> None:
        for key in NO_GROUPS:
            if key in recipe.training:
                raise RecipeError(f"`training.{key}` has no effect in stage `{recipe.stage}`. Remove it.")
        super().__init__(recipe, *arguments, **options)

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
