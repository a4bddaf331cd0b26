"""Ask the model about many texts at a time; each gets the answer that it would get alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from cpt.commands.synthesis.sampling import Sampling
from cpt.errors import ResourceError


@dataclass(frozen=True)
class Answer:
    text: str
    is_cut_off: bool
    """It had not ended when it had `max_new_tokens`."""


class Answerer:
    """A model that is asked, with its tokenizer."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, batch_size: int
    ) -> None:
        self._model, self._tokenizer, self._sampling, self._batch_size = model.eval(), tokenizer, sampling, batch_size
        self._ends = end_tokens(model, tokenizer)
        self._pad = self._ends[0] if tokenizer.pad_token_id is None else int(cast(int, tokenizer.pad_token_id))
        # In the place of the model's own, from which `generate` would take what a config beside it does not say
        # (penalties, sampling).
        model.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=self._ends,
            pad_token_id=self._pad,
            use_cache=True,
        )

    def answer(self, questions: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Answer]:
        """The answers, in the order of the questions; those of like length are asked together."""
        order = sorted(range(len(questions)), key=lambda number: len(questions[number]))
        answers: dict[int, Answer] = {}
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            made = self._answer_batch([questions[number] for number in batch], [seeds[number] for number in batch])
            answers.update(zip(batch, made, strict=True))
        return [answers[number] for number in range(len(questions))]

    def _answer_batch(self, questions: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Answer]:
        """Padded on the left, so that all go on at the same place; the mask tells `generate` the padding and the
        positions."""
        length = max(map(len, questions))
        ids = torch.tensor([[self._pad] * (length - len(question)) + [*question] for question in questions])
        mask = torch.tensor([[0] * (length - len(question)) + [1] * len(question) for question in questions])
        device = self._model.device
        try:
            written = self._model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                logits_processor=self._sampling.processors(seeds, length),
            )
        except torch.OutOfMemoryError as problem:
            raise ResourceError(
                f"the GPU's memory does not hold {len(questions)} texts at a time. Use a smaller --batch-size."
            ) from problem
        return [self._read(row) for row in cast(torch.Tensor, written)[:, length:].tolist()]

    def _read(self, ids: Sequence[int]) -> Answer:
        """The text up to its end."""
        end = next((place for place, token in enumerate(ids) if token in self._ends), None)
        text = str(self._tokenizer.decode(list(ids[:end]), skip_special_tokens=True))
        return Answer(text.replace("\0", "").strip(), end is None)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end an answer: the tokenizer's, and those that the model came with (a chat's end of turn)."""
    own = None if model.generation_config is None else model.generation_config.eos_token_id
    listed = own if isinstance(own, list) else [] if own is None else [own]
    return list(dict.fromkeys([int(cast(int, tokenizer.eos_token_id)), *map(int, listed)]))
