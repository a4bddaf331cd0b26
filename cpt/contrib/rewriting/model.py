"""Prompt a model with many texts: a local one in batches, where each text gets the same answer as alone, or one behind
an OpenAI-compatible server, concurrently and again after transient failures."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, cast

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
from cpt.errors import Interrupted, LaunchError, RecipeError, ResourceError, install_line

log = logging.getLogger("cpt")
TEXT = "{text}"
PLACE = "\ufdd0the text goes here\ufdd0"  # a Unicode noncharacter, which texts do not contain
SEPARATORS = ("\n\n", "\n", ". ", " ")
KEYS = ("CPT_API_KEY", "OPENAI_API_KEY")  # of the environment
# The client of `openai` repeats after 408, 409, 429, 5xx, lost connections and time-outs: it waits 0.5, 1, 2, 4 s or
# what Retry-After says, up to a minute. We repeat that, and calls with unreadable answers, for so long:
CLIENT_RETRIES, PATIENCE_SECONDS, PAUSE_SECONDS = 4, 600.0, 1.0
TRANSIENT = (408, 409, 429)
CONCURRENCY, TIMEOUT = 32, 600.0


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int = 512
    temperature: float = 0.7  # 0: greedy decoding
    top_p: float = 0.95  # sample from the most likely tokens with this total probability


@dataclass(frozen=True)
class Answer:
    text: str
    is_cut_off: bool  # reached `max_new_tokens` before its end
    model: str | None = None  # the name that a server gives its model


class Answerer:
    continues = False  # whether an answer's text begins with its question

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
                begun = questions[number] if self.continues else ()
                text = str(self.tokenizer.decode([*begun, *row[:end]], skip_special_tokens=True))
                answers[number] = Answer(text.replace("\0", "").strip(), end is None)
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


Ask = Callable[[Sequence[tuple[str, int]], Callable[[int, Answer], None]], Awaitable[None]]
"""Takes prompts with their seeds, and calls the function with the number and the answer of each when it is there."""


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server, such as `cpt serve`, vLLM or a provider."""

    url: str  # http://localhost:8000/v1
    model: str
    concurrency: int = CONCURRENCY  # calls at a time
    timeout: float = TIMEOUT  # seconds for a call

    @asynccontextmanager
    async def asking(self, sampling: Sampling) -> AsyncIterator[Ask]:
        try:
            from openai import AsyncOpenAI  # it takes a second
        except ImportError as problem:
            raise ResourceError(f"--endpoint needs the package openai: {install_line('rewriting')}") from problem
        key = next((os.environ[name] for name in KEYS if os.environ.get(name)), "no-key")
        room = asyncio.Semaphore(self.concurrency)

        async def ask(questions: Sequence[tuple[str, int]], take: Callable[[int, Answer], None]) -> None:
            async def ask_one(number: int) -> None:
                async with room:
                    take(number, await self.answer(client, *questions[number], sampling))

            await asyncio.gather(*map(ask_one, range(len(questions))))

        options: dict[str, Any] = {"timeout": self.timeout, "max_retries": CLIENT_RETRIES}
        async with AsyncOpenAI(base_url=self.url, api_key=key, **options) as client:
            yield ask

    async def answer(self, client: Any, prompt: str, seed: int, sampling: Sampling) -> Answer:
        """Send the prompt as a chat until it is answered.

        Raises:
            LaunchError: the server refuses the call.
            Interrupted: the call failed for `PATIENCE_SECONDS`.
        """
        from openai import APIError, APIStatusError

        options: dict[str, Any] = {"temperature": sampling.temperature, "seed": seed}
        if sampling.temperature > 0:
            options["top_p"] = sampling.top_p
        messages, begin = [{"role": "user", "content": prompt.strip()}], monotonic()
        while True:
            try:
                return read_answer(
                    await client.chat.completions.create(
                        model=self.model, messages=messages, max_tokens=sampling.max_new_tokens, **options
                    )
                )
            except (APIError, ValueError, LookupError, TypeError, AttributeError) as problem:
                what = " ".join(str(problem).replace(client.api_key, "***").split())[:300]
                status = problem.status_code if isinstance(problem, APIStatusError) else None
                if status is not None and status < 500 and status not in TRANSIENT:
                    remedy = f"Correct --endpoint, --model, the key in {' or '.join(KEYS)}, or --max-input-tokens."
                    raise LaunchError(f"{self.url} refuses a call: {what} {remedy}") from problem
                if monotonic() - begin > PATIENCE_SECONDS:
                    again = "Finished answers are kept: repeat the command to resume."
                    raise Interrupted(f"{self.url}: a call failed for minutes: {what} {again}") from problem
                log.info(f"{self.url}: {what}; trying again")
            await asyncio.sleep(PAUSE_SECONDS)


def read_answer(completion: Any) -> Answer:
    """The text of a completion; an error of Python's if it has another shape."""
    choice = completion.choices[0]
    if choice.finish_reason in ("abort", "error"):  # of servers that shut down
        raise ValueError(f"the server ended an answer with `{choice.finish_reason}`")
    text = (choice.message.content or "").rpartition("</think>")[2]  # without the thoughts of a reasoning model
    clean = text.encode(errors="replace").decode().replace("\0", "").strip()
    return Answer(clean, choice.finish_reason == "length", completion.model)


class RewriteQuestion:
    """A tokenizer's chat format around a question. `<|im_end|>` in a document is encoded as plain text, so a document
    cannot end its turn of the chat."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
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

    def ids(self, question: str) -> list[int]:
        return [*self.head, *encode(self.tokenizer, question.strip() if self.is_chat else question), *self.tail]


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, as_text: bool = True) -> list[int]:
    """Encode a text. With `as_text`, special tokens in it are encoded as plain text."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=as_text)["input_ids"])


def cut(text: str, max_tokens: int, count: Callable[[str], int], separators: Sequence[str] = SEPARATORS) -> list[str]:
    """Cut a text into pieces of at most `max_tokens` tokens, as `count` counts them: at ends of paragraphs, or lines,
    sentences, words."""
    if count(text) <= max_tokens:
        return [text]
    if not separators:
        half = len(text) // 2
        halves = [text[:half], text[half:]] if half else []
        return [piece for part in halves for piece in cut(part, max_tokens, count, ())] or [text]
    separator, *finer = separators
    parts = [part + separator for part in text.split(separator)]
    parts[-1] = parts[-1].removesuffix(separator)
    pieces, room = [""], max_tokens
    for part in parts:
        length = count(part)
        if length > room and pieces[-1]:
            pieces.append("")
            room = max_tokens
        pieces[-1] += part
        room -= length
    kept = [piece.strip() for piece in pieces if piece.strip()]
    return [small for piece in kept for small in cut(piece, max_tokens, count, finer)]
