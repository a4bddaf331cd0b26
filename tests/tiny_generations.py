"""Stages that sample: prompts and answers of unequal lengths, rewards that tell answers apart, and the samples."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from taken_steps import SIZES, Step, Taken, log_probabilities, take_steps
from tiny_rewards import MODEL, bandit, words
from transformers.trainer_callback import PrinterCallback

from cpt.stages.build import stage_trainer
from cpt.stages.models import model_for
from cpt.training.arguments import training_arguments

TEMPERATURE = 0.8
LONGEST = 7
SAMPLING = {**SIZES, "max_completion_length": LONGEST, "temperature": TEMPERATURE}
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


def samples_of_step(step: Step) -> list[Sample]:
    return [sample for batch in step.micro_batches for sample in samples_of(batch)]


@dataclass
class Generation:
    """All steps on one generation of answers."""

    taken: Taken
    steps: list[Step]
    parts: int  # steps until each answer has been used once

    @property
    def sampling(self) -> Any:
        """The model that sampled."""
        return self.taken.model(self.steps[0].weights)

    @property
    def samples(self) -> list[Sample]:
        """Each once, although each is in several steps."""
        return [sample for step in self.steps[: self.parts] for sample in samples_of_step(step)]

    @property
    def tokens_of_step(self) -> float:
        """On average."""
        return sum(len(sample.answer) for sample in self.samples) / self.parts

    def read(self, model: Any) -> dict[Sample, torch.Tensor]:
        """Log-probabilities of each sample's tokens, without a gradient."""
        with torch.no_grad():
            return {sample: sample.read_by(model)[0] for sample in self.samples}


def generations(taken: Taken, *, parts: int = 2, uses: int = 2) -> list[Generation]:
    """Each lasts for `parts` x `uses` steps."""
    steps, length = taken.steps, parts * uses
    assert len(steps) % length == 0
    firsts = range(0, len(steps), length)
    made = [Generation(taken, steps[first : first + length], parts) for first in firsts]
    samples = [sample for generation in made for sample in generation.samples]
    lengths = {len(sample.answer) for sample in samples}
    assert len(samples) == 12 * len(made) and min(lengths) < 3 and max(lengths) == LONGEST
    assert any(sample.reward != sample.reward for sample in samples)
    return made


def trainer_of(
    stage: str,
    folder: Path,
    *,
    steps: int,
    seed: int = 42,
    learning_rate: float = 2e-3,
    config: dict[str, Any] = MODEL,
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
        model={"from_scratch": True, "config": config},
        rewards=[] if distils else rewards,
        training=SAMPLING | training,
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


def steps_on_samples(stage: str, folder: Path, *, steps: int, **training: Any) -> Taken:
    return take_steps(trainer_of(stage, folder, steps=steps, **training))


def assert_clipped(
    ratios: Iterable[float], advantages: Iterable[float], low: float, high: float
) -> None:
    """On both sides, but not everywhere."""
    pairs = list(zip(ratios, advantages, strict=True))
    above = [ratio > 1 + high for ratio, advantage in pairs if advantage > 0]
    below = [ratio < 1 - low for ratio, advantage in pairs if advantage < 0]
    for clipped in (above, below):
        assert any(clipped) and not all(clipped)
