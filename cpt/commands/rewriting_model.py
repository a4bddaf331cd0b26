"""Prompt a local model with batches of texts; each text gets the same answer as alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
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
PLACE = "\ufdd0the text goes here\ufdd0"  # a Unicode noncharacter, which texts do not contain
SEPARATORS = ("\n\n", "\n", ". ", " ")


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int = 512
    temperature: float = 0.7  # 0: greedy decoding
    top_p: float = 0.95  # sample from the most likely tokens with this total probability


@dataclass(frozen=True)
class Answer:
    text: str
    is_cut_off: bool  # reached `max_new_tokens` before its end
    ids: tuple[int, ...] = ()  # without the token that ends it


class Answerer:
    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, batch_size: int
    ) -> None:
        self.model, self.tokenizer, self.sampling, self.batch_size = model.eval(), tokenizer, sampling, batch_size
        # An answer ends with the tokenizer's EOS, or with those of the model's generation config (end of turn).
        own = None if model.generation_config is None else model.generation_config.eos_token_id
        listed = own if isinstance(own, list) else [] if own is None else [own]
        self.ends = list(dict.fromkeys([int(cast(int, tokenizer.eos_token_id)), *map(int, listed)]))
        self.pad = int(cast(int, tokenizer.pad_token_id))
        # Replaces the model's config: `generate` would take every option from it that a second config does not set.
        model.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=self.ends,
            pad_token_id=self.pad,
            use_cache=True,
        )

    def answer(self, questions: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Answer]:
        """Return the answers in the order of the questions; batches have questions of similar length."""
        order = sorted(range(len(questions)), key=lambda number: len(questions[number]))
        answers: dict[int, Answer] = {}
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            length = len(questions[batch[-1]])
            # Padded on the left; `generate` derives positions from the mask.
            rows = [torch.tensor(questions[number], device=self.model.device) for number in batch]
            ids = pad_sequence(rows, batch_first=True, padding_value=self.pad, padding_side="left")
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
            processors = LogitsProcessorList()
            if self.sampling.temperature > 0:
                narrowed = [TopPLogitsWarper(self.sampling.top_p)] if self.sampling.top_p < 1 else []
                drawn = SeededDraws([seeds[number] for number in batch], length, self.sampling.max_new_tokens)
                processors += [TemperatureLogitsWarper(self.sampling.temperature), *narrowed, drawn]
            try:
                written = self.model.generate(input_ids=ids, attention_mask=mask, logits_processor=processors)
            except torch.OutOfMemoryError as problem:
                what = f"out of GPU memory with {len(batch)} texts"
                raise ResourceError(f"{what}. Lower --batch-size.") from problem
            for number, row in zip(batch, cast(Tensor, written)[:, length:].tolist(), strict=True):
                end = next((place for place, token in enumerate(row) if token in self.ends), None)
                text = str(self.tokenizer.decode(row[:end], skip_special_tokens=True))
                answers[number] = Answer(text.replace("\0", "").strip(), end is None, tuple(row[:end]))
        return [answers[number] for number in range(len(questions))]


class SeededDraws(LogitsProcessor):
    """Leave only the token chosen by the random numbers of each row's seed: transformers has one random stream for the
    whole batch, so a text's answer would depend on the other texts."""

    def __init__(self, seeds: Sequence[int], prompt_length: int, max_new_tokens: int) -> None:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]  # on the CPU: the same on any device
        numbers = [torch.rand(max_new_tokens, generator=one, dtype=torch.float64) for one in generators]
        self.numbers = torch.stack(numbers)
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        numbers = self.numbers[:, input_ids.shape[1] - self.prompt_length, None].to(scores.device)
        sums = scores.double().softmax(-1).cumsum(-1)  # B batch, V vocabulary
        tokens = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)


class RewriteQuestion:
    """A template prepared for a tokenizer. `<|im_end|>` in a document is encoded as plain text, so a document cannot
    end its turn of the chat."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        self.tokenizer = tokenizer
        self.before, self.after = template.split(TEXT, 1)
        self.is_chat = tokenizer.chat_template is not None
        self.head, self.tail = list[int](), list[int]()
        if self.is_chat:
            # Thinking is disabled, an option of Qwen3.
            message = [{"role": "user", "content": PLACE}]
            chat = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            before, place, after = str(chat).partition(PLACE)
            if not place:
                name = tokenizer.name_or_path
                raise RecipeError(f"the chat template of `{name}` omits the user's message. Choose another --model.")
            self.head, self.tail = (encode(tokenizer, part, as_text=False) for part in (before, after))
        elif adds_bos(tokenizer) and tokenizer.bos_token_id is not None:
            self.head = [int(tokenizer.bos_token_id)]

    def ids(self, text: str) -> list[int]:
        question = self.before + text + self.after.replace(TEXT, text)
        return [*self.head, *encode(self.tokenizer, question.strip() if self.is_chat else question), *self.tail]


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, as_text: bool = True) -> list[int]:
    """Encode a text. With `as_text`, special tokens in it are encoded as plain text."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=as_text)["input_ids"])


def cut(
    text: str, max_tokens: int, tokenizer: PreTrainedTokenizerBase, separators: Sequence[str] = SEPARATORS
) -> list[str]:
    """Cut a text into pieces of at most `max_tokens` tokens: at ends of paragraphs, or lines, sentences, words."""
    if len(encode(tokenizer, text)) <= max_tokens:
        return [text]
    if not separators:
        half = len(text) // 2
        halves = [text[:half], text[half:]] if half else []
        return [piece for part in halves for piece in cut(part, max_tokens, tokenizer, ())] or [text]
    separator, *finer = separators
    parts = [part + separator for part in text.split(separator)]
    parts[-1] = parts[-1].removesuffix(separator)
    pieces, room = [""], max_tokens
    for part in parts:
        length = len(encode(tokenizer, part))
        if length > room and pieces[-1]:
            pieces.append("")
            room = max_tokens
        pieces[-1] += part
        room -= length
    kept = [piece.strip() for piece in pieces if piece.strip()]
    return [small for piece in kept for small in cut(piece, max_tokens, tokenizer, finer)]
