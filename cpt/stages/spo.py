"""Single-stream policy optimisation (arXiv 2509.13232): one answer to a prompt, compared with what the prompt's
answers were worth before.

The paper's: the value tracker, the advantage (reward less the value before this answer, normalised over the whole
batch), the clipped policy loss, and prompts chosen by sqrt(v (1 - v)) + epsilon. Ours: how the tracker begins and how
drift is measured (see ValueTracker), the floor under the deviation that advantages are divided by, all defaults but
`rho_min`, `rho_max` and `half_life`, and where prompts are
chosen from: `prompts_read` x as many as are answered, the next ones of the data. So data stay a function of the step,
and a choice depends on it, the seed and the tracker alone, which a checkpoint keeps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from trl import GRPOConfig

from cpt.errors import RecipeError
from cpt.recipe.schema import Recipe
from cpt.stages.sampling.generation_batches import on_device, reference_for
from cpt.stages.sampling.generations import Prompt, prompts_of_step
from cpt.stages.sampling.rewarded import RewardedTrainer, single_answers
from cpt.stages.sampling.value_tracker import ValueTracker
from cpt.stages.trainer import builder

COLUMNS = ("prompt",)
SAMPLED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


@dataclass
class SPOConfig(GRPOConfig):  # type: ignore[misc]
    """GRPOConfig with what SPO adds; each prompt is answered once."""

    num_generations: int | None = 1
    half_life: float = 0.06
    """Drift of the policy (KL divergence of a token, in nats) after which what a prompt's answers were worth counts
    half."""
    rho_min: float = 0.875
    """The least that the past counts at a prompt's next answer."""
    rho_max: float = 0.96
    """The most."""
    prompts_read: int = 1
    """Prompts that are read for each one that is answered; those to answer are drawn from them. 1 answers all."""
    least_priority: float = 0.05
    """Added to each prompt's weight in that draw, so that none is given up."""
    least_deviation: float = 0.1
    """The smallest deviation that advantages are divided by. Where all answers are right, what is left of them is the
    tracker's error; made as large as any other, it would unlearn the answers."""

    def __post_init__(self) -> None:
        answers = self.num_generations
        if answers == 1:
            self.num_generations = single_answers(self)
        super().__post_init__()
        self.num_generations = answers
        if not 0 < self.rho_min <= self.rho_max < 1:
            raise ValueError(
                f"rho_min {self.rho_min} and rho_max {self.rho_max}: 0 < rho_min <= rho_max < 1 is needed"
            )
        if self.prompts_read < 1 or self.half_life <= 0:
            raise ValueError(
                f"prompts_read {self.prompts_read} has to be at least 1, half_life {self.half_life} above 0"
            )


CONFIG = SPOConfig


class SPOTrainer(RewardedTrainer):
    """A value for each prompt beside the policy."""

    def __init__(self, recipe: Recipe, model: nn.Module, arguments: SPOConfig, **options: Any) -> None:
        if "least_priority" in recipe.training and arguments.prompts_read == 1:
            raise RecipeError(
                "`training.least_priority` would have no effect: all prompts are answered. Set `prompts_read` above 1."
            )
        self.tracker = ValueTracker(
            half_life=arguments.half_life, rho_min=arguments.rho_min, rho_max=arguments.rho_max
        )
        self.answered: list[Any] = []
        self.last: dict[str, torch.Tensor] | None = None
        self.read_for_each = arguments.prompts_read
        super().__init__(recipe, model, arguments, **options)

    def choose(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """Those of the next prompts that most is to be learned from; the same on all processes, as the tracker is."""
        config: Any = self.args
        seed = f"{self.recipe.seed} {self._step // self.generations.micro_batches}"
        count = len(prompts) // self.read_for_each
        numbers = self.tracker.choose(
            [row["prompt"] for row in prompts], count, least=config.least_priority, seed=seed
        )
        chosen = [prompts[number] for number in numbers]
        self.answered = [row["prompt"] for row in chosen for _ in range(config.num_generations)]
        return chosen

    def advantages_of(self, inputs: list[dict[str, Any]], made: dict[str, Any]) -> dict[str, Any]:
        """Rewards less the tracked values from before them, normalised over all processes; then the tracker learns."""
        self.follow_drift(made)
        rewards = self.rewards_of_all
        before = torch.tensor(self.tracker.values(self.answered), device=rewards.device, dtype=rewards.dtype)
        rho = self.tracker.learn(self.answered, rewards.tolist())
        surprise = rewards - before
        known = surprise[~surprise.isnan()]
        self.note_tracker(before, known, rho)
        config: Any = self.args
        if len(known) > 1:
            surprise = (surprise - known.mean()) / known.std(correction=0).clamp(min=config.least_deviation)
        size = len(surprise) // config.world_size
        return {"advantages": surprise.nan_to_num(0.0)[config.process_index * size :][:size]}

    def follow_drift(self, made: dict[str, Any]) -> None:
        """Add how far the policy moved since the last generation, by what it thinks now of that one's completions.

        The mean over tokens of exp(d) - d - 1, d being the change of a token's log-probability: never negative, and on
        average the KL divergence of the present policy from the one that sampled.
        """
        if self.last is not None:
            change = self.log_probabilities(self.last) - self.last["logps"]
            mask = self.last["completion_mask"]
            moved = ((change.exp() - change - 1) * mask).sum()
            total, tokens = self.accelerator.reduce(
                torch.stack((moved, mask.sum().to(moved.dtype))), reduction="sum"
            ).tolist()
            self.tracker.drift += total / max(tokens, 1.0)
        known = made.get("old_per_token_logps")
        logps = self.log_probabilities(made) if known is None else known
        self.last = {**{name: made[name] for name in SAMPLED}, "logps": logps}

    def note_tracker(self, before: torch.Tensor, surprise: torch.Tensor, rho: float) -> None:
        """For the log."""
        figures = {"value/mean": before.mean().item(), "value/drift": self.tracker.drift, "value/rho": rho}
        if len(surprise):
            figures["value/error"] = surprise.abs().mean().item()
        for name, value in figures.items():
            self.note_figure(name, value)

    def state_of_process(self) -> dict[str, Any]:
        """The last completions, of which the drift is measured."""
        return {"last": self.last}

    def restore_process(self, state: Mapping[str, Any]) -> None:
        """Go on with them; without them the drift of one generation is not counted."""
        last = state.get("last")
        self.last = None if last is None else on_device(last, self.args.device)

    def own_state(self) -> dict[str, Any]:
        """The tracker."""
        return self.tracker.state()

    def restore_own(self, state: Mapping[str, Any]) -> None:
        """Go on with it."""
        self.tracker.restore(state)


def rows_of_step(training: Mapping[str, Any], rows: int) -> int:
    """Prompts that are read in an optimizer step of so many completions."""
    return prompts_of_step(
        CONFIG, training, rows, read_for_each=int(training.get("prompts_read", SPOConfig.prompts_read))
    )


# The reference, where `beta` asks for one, is the model as the run found it.
build_trainer = builder(SPOTrainer, reference=reference_for)
