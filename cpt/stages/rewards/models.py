"""A reward from a model that was trained to judge: the reward stage's export, or any sequence classifier with one
output."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import deepspeed

from cpt.errors import RecipeError
from cpt.runs.record import Run
from cpt.stages.rewards.texts import Text


def reward_model(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    *,
    path: str,
    revision: str | None = None,
    batch_size: int = 8,
) -> list[float]:
    """What a model says of each completion behind its prompt.

    Args:
        path: a run's folder, a model's folder, or its Hub id.
        revision: of a model on the Hub.
        batch_size: completions that it reads at once.
    """
    model, tokenizer = load_judge(path, revision)
    texts = [whole_text(tokenizer, prompt, said) for prompt, said in zip(prompts, completions, strict=True)]
    scores: list[float] = []
    for first in range(0, len(texts), batch_size):
        some = texts[first : first + batch_size]
        batch = tokenizer(some, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False).to(
            model.device
        )
        with torch.no_grad():
            scores += (
                model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
                .logits[:, 0]
                .float()
                .tolist()
            )
    return scores


def whole_text(tokenizer: PreTrainedTokenizerBase, prompt: Text, completion: Text) -> str:
    """A prompt and its completion, as the judge read them in its training."""
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt + completion
    messages: list[Any] = [*prompt, *completion]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


@cache
def load_judge(path: str, revision: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model on the run's device, whole on each process, and its tokenizer.

    Raises:
        RecipeError: there is none, or it does not give one number.
    """
    folder = str(Run(Path(path)).export_folder) if Run(Path(path)).export_folder.is_dir() else path
    try:
        with whole_under_zero3():
            model = AutoModelForSequenceClassification.from_pretrained(
                folder, revision=revision or "main", dtype="auto"
            )
        tokenizer = AutoTokenizer.from_pretrained(folder, revision=revision or "main")
    except (OSError, ValueError, KeyError) as problem:
        raise RecipeError(
            f"the reward model {path} cannot be loaded: {' '.join(str(problem).split())[:400]}"
        ) from problem
    if model.config.num_labels != 1:
        raise RecipeError(
            f"the reward model {path} gives {model.config.num_labels} numbers of a text. A reward is one: take"
            " another."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = (
        tokenizer.pad_token_id
    )  # the score is that of the last token that is no padding
    return model.to(PartialState().device).eval().requires_grad_(False), tokenizer


@contextmanager
def whole_under_zero3() -> Iterator[None]:
    """While it is open, models are loaded whole also where the run's DeepSpeed profile would cut them into parts."""
    found = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = found
