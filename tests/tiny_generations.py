"""Stages that sample: prompts and answers of unequal lengths, rewards that tell answers apart, and the samples."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from taken_steps import Step, independent, log_probabilities, move, take_steps
from tiny_rewards import bandit, words
from transformers.trainer_callback import PrinterCallback

from cpt.stages.build import stage_trainer
from cpt.stages.models import model_for
from cpt.training.arguments import training_arguments

TEMPERATURE = 0.8
LONGEST = 7
SIZES = {
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "max_completion_length": LONGEST,
    "temperature": TEMPERATURE,
    "max_grad_norm": 0.1,
}
WEIGHT = 2.0


class UnequalPrompts:
    """Of one to four words, no two of the same."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {
            "prompt": " ".join(f"w{(7 * number + word) % 20}" for word in range(1 + number % 4))
        }


def score_of(ids: list[int]) -> float | None:
    """None for a few answers."""
    return None if sum(ids) % 7 == 0 else (sum(ids) % 5) / 2 - 0.25 * len(ids)


def score(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A reward."""
    return [score_of(ids) for ids in completion_ids]


@dataclass(frozen=True)
class Sample:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    learned: bool = True  # False for a truncated answer that is masked

    @property
    def reward(self) -> float:
        """With its weight; NaN if it does not apply."""
        found = score_of(list(self.answer))
        return float("nan") if found is None else WEIGHT * found

    def read_by(self, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the answer's tokens [T], and of all tokens there [T, V]."""
        ids, start = [*self.prompt, *self.answer], len(self.prompt) - 1
        tokens, every = log_probabilities(model, ids, temperature=TEMPERATURE)
        return tokens[start:], every[start:]


def samples_of(batch: dict[str, torch.Tensor]) -> list[Sample]:
    """Of a micro-batch, without padding."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    samples = []
    for prompt, read, answer, learned in zip(*(batch[name] for name in names), strict=True):
        length = int(learned.sum()) or LONGEST
        samples.append(
            Sample(
                prompt=tuple(prompt[read.bool()].tolist()),
                answer=tuple(answer[:length].tolist()),
                learned=bool(learned.any()),
            )
        )
    return samples


@dataclass
class Generation:
    """All steps on one generation of answers."""

    trainer: Any
    steps: list[Step]
    reference: Any  # a model in float64

    def model(self, step: Step) -> Any:
        """A model in float64 with the weights before the step."""
        return independent(self.trainer.model.config, step.weights, type(self.trainer.model))

    @property
    def sampling(self) -> Any:
        """The model that sampled."""
        return self.model(self.steps[0])

    @property
    def samples(self) -> list[Sample]:
        """Each once, although each is in several steps."""
        accumulation = self.trainer.args.gradient_accumulation_steps
        steps = self.trainer.args.steps_per_generation // accumulation
        batches = [batch for step in self.steps[:steps] for batch in step.micro_batches]
        return [sample for batch in batches for sample in samples_of(batch)]

    def read(self, model: Any) -> dict[Sample, torch.Tensor]:
        """Log-probabilities of each sample's tokens, without a gradient."""
        with torch.no_grad():
            return {sample: sample.read_by(model)[0] for sample in self.samples}


def trainer_of(
    stage: str,
    folder: Path,
    *,
    steps: int,
    seed: int = 42,
    learning_rate: float = 2e-3,
    **training: Any,
) -> Any:
    """As a run builds it, but for the data; `score` is the reward."""
    rewards = [{"name": "tiny_generations:score", "weight": WEIGHT}]
    distils = stage == "distill_on_policy"
    recipe = bandit(
        stage,
        folder,
        steps=steps,
        seed=seed,
        learning_rate=learning_rate,
        rewards=[] if distils else rewards,
        training=SIZES | training,
    )
    data: Any = SimpleNamespace(
        rows=UnequalPrompts(), held_out={}, num_tokens=10**6, num_rows=10**6, form="prompt"
    )
    arguments = training_arguments(recipe, recipe.output_dir / recipe.name, data)
    tokenizer = words()
    model = model_for(recipe, tokenizer, arguments)
    trainer = stage_trainer(recipe, model, tokenizer, data, arguments)
    trainer.remove_callback(PrinterCallback)
    return trainer


def generate(stage: str, folder: Path, *, steps: int, **training: Any) -> list[Generation]:
    """Train for so many steps with a model that has moved away from its reference."""
    trainer = trainer_of(stage, folder, steps=steps, **training)
    model = trainer.model
    before = {name: one.clone() for name, one in model.state_dict().items()}
    move(model)
    with torch.no_grad():  # certain of where to end, so that lengths differ
        model.lm_head.weight[trainer.processing_class.eos_token_id] *= 6
    taken = take_steps(trainer)
    reference = independent(model.config, before, type(model))
    settings = vars(trainer.args)
    batches = settings.get("steps_per_generation", 0) * settings.get("num_iterations", 0)
    of_each = batches // trainer.args.gradient_accumulation_steps or steps
    parts = (taken[first : first + of_each] for first in range(0, steps, of_each))
    return [Generation(trainer, part, reference) for part in parts]


def assert_clipped(
    ratios: Iterable[Any], advantages: Iterable[float], low: float, high: float
) -> None:
    """On both sides, but not everywhere."""
    pairs = list(zip(map(float, ratios), advantages, strict=True))
    above = [ratio > 1 + high for ratio, advantage in pairs if advantage > 0]
    below = [ratio < 1 - low for ratio, advantage in pairs if advantage < 0]
    for clipped in (above, below):
        assert any(clipped) and not all(clipped)
