"""Stages that sample: prompts and answers of unequal lengths, rewards that tell answers apart, and what they sampled."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from taken_steps import Step, independent, log_probabilities, move, take_steps
from tiny_rewards import MODEL, bandit, words
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
        return {"prompt": " ".join(f"w{(7 * number + word) % 20}" for word in range(1 + number % 4))}


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
    """All steps on one generation of answers, and models in float64."""

    trainer: Any
    steps: list[Step]
    reference: Any
    sampling: Any

    def model(self, step: Step) -> Any:
        return independent(self.trainer.model.config, step.weights, type(self.trainer.model))

    @property
    def samples(self) -> list[Sample]:
        """Each once, although each is in several steps."""
        batches = self.trainer.args.steps_per_generation
        flat = [batch for step in self.steps for batch in step.micro_batches]
        return [sample for batch in flat[:batches] for sample in samples_of(batch)]


def trainer_of(stage: str, folder: Path, *, steps: int, seed: int = 42, learning_rate: float = 2e-3, **training: Any) -> Any:
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


def generate(stage: str, folder: Path, *, steps: int, **training: Any) -> Generation:
    """Train for so many steps on one generation of a model that has moved away from its reference."""
    trainer = trainer_of(stage, folder, steps=steps, **training)
    model = trainer.model
    before = {name: one.clone() for name, one in model.state_dict().items()}
    move(model)
    with torch.no_grad():  # certain of where to end, so that lengths differ
        model.lm_head.weight[trainer.processing_class.eos_token_id] *= 6
    taken = take_steps(trainer)
    reference, sampling = (
        independent(model.config, weights, type(model)) for weights in (before, taken[0].weights)
    )
    return Generation(trainer, taken, reference, sampling)
