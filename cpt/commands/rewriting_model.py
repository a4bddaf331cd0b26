"""Ask a local model about many texts at a time; each gets the answer that it would get alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from cpt.data.store.tokenization import adds_bos
from cpt.errors import RecipeError, ResourceError

TEXT = "{text}"
PLACE = "\ufdd0the text goes here\ufdd0"  # no text has this character (a noncharacter of Unicode)


SEPARATORS = ("\n\n", "\n", ". ", " ")


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int = 512
    temperature: float = 0.7
    """0: always the most likely token."""
    top_p: float = 0.95
    """Only the most likely tokens that have this much of the probability together."""

    def processors(self, seeds: Sequence[int], prompt_length: int) -> LogitsProcessorList:
        if self.temperature == 0:
            return LogitsProcessorList()
        narrowed = [TopPLogitsWarper(self.top_p)] if self.top_p < 1 else []
        drawn = SeededDraws(seeds, prompt_length, self.max_new_tokens)
        return LogitsProcessorList([TemperatureLogitsWarper(self.temperature), *narrowed, drawn])


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


class SeededDraws(LogitsProcessor):
    """Leaves only the token that the random numbers of each row's own seed choose."""

    def __init__(self, seeds: Sequence[int], prompt_length: int, max_new_tokens: int) -> None:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]  # on the CPU: the same on any device
        self._numbers = torch.stack(
            [torch.rand(max_new_tokens, generator=one, dtype=torch.float64) for one in generators]
        )
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        numbers = self._numbers[:, input_ids.shape[1] - self._prompt_length, None].to(scores.device)
        sums = scores.double().softmax(-1).cumsum(-1)  # B batch, V vocabulary
        tokens = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)


class RewriteQuestion:
    """A template, made ready for a tokenizer.

    A text never becomes a special token: `<|im_end|>` in a document is text like any other, so a document cannot end
    its turn of the chat.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        self._tokenizer = tokenizer
        self._before, self._after = template.split(TEXT, 1)
        self._is_chat = tokenizer.chat_template is not None
        if not self._is_chat:
            self._head = (
                [int(tokenizer.bos_token_id)] if adds_bos(tokenizer) and tokenizer.bos_token_id is not None else []
            )
            self._tail: list[int] = []
        else:
            self._head, self._tail = (encode(tokenizer, part, as_text=False) for part in chat_around(tokenizer))

    def ids(self, text: str) -> list[int]:
        asked = self._before + text + self._after.replace(TEXT, text)
        return [*self._head, *encode(self._tokenizer, asked.strip() if self._is_chat else asked), *self._tail]

    def num_tokens_around(self) -> int:
        """Tokens of the question without a text."""
        return len(self.ids(""))


def chat_around(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the chat template writes before and after a question. Models that can think aloud are told not to (Qwen3
    reads that option)."""
    message = [{"role": "user", "content": PLACE}]
    chat = str(
        tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    )
    before, place, after = chat.partition(PLACE)
    if not place:
        raise RecipeError(
            f"the chat template of `{tokenizer.name_or_path}` does not write what the user says. Choose another"
            " --model."
        )
    return before, after


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, as_text: bool = True) -> list[int]:
    """The ids of a text; those of special tokens only where it is ours."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=as_text)["input_ids"])


def cut(
    text: str, max_tokens: int, tokenizer: PreTrainedTokenizerBase, separators: Sequence[str] = SEPARATORS
) -> list[str]:
    """A text in pieces of at most `max_tokens` tokens, cut at ends of paragraphs; where one is too long, of lines,
    sentences or words."""
    if len(encode(tokenizer, text)) <= max_tokens:
        return [text]
    if not separators:
        half = len(text) // 2
        return (
            [text]
            if half == 0
            else [*cut(text[:half], max_tokens, tokenizer, ()), *cut(text[half:], max_tokens, tokenizer, ())]
        )
    separator, *finer = separators
    parts = [part + separator for part in text.split(separator)]
    parts[-1] = parts[-1].removesuffix(separator)
    pieces = ["".join(group).strip() for group in filled(parts, max_tokens, tokenizer)]
    return [small for piece in pieces if piece for small in cut(piece, max_tokens, tokenizer, finer)]


def filled(parts: Sequence[str], max_tokens: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[str]]:
    """Parts that come one after the other, as many together as there is room for."""
    lengths = [
        len(ids) for ids in tokenizer(list(parts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    ]
    groups, group, room = [], 0, max_tokens
    for length in lengths:
        if length > room and room < max_tokens:
            group, room = group + 1, max_tokens
        groups.append(group)
        room -= length
    for _, numbers in groupby(range(len(parts)), key=lambda number: groups[number]):
        yield [parts[number] for number in numbers]
