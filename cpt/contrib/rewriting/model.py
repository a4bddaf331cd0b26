"""Prompt a model with many texts: a local one in batches, where each text gets the same answer as alone, or one behind
an OpenAI-compatible server, concurrently and again after transient failures."""

import asyncio
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
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
PLACE = "\ufdd0the text goes here\ufdd0"  # a Unicode noncharacter, which texts do not contain
SEPARATORS = ("\n\n", "\n", ". ", " ")
KEYS = ("CPT_API_KEY", "OPENAI_API_KEY")  # of the environment
# Calls that fail for the moment are repeated until nothing was answered for `PATIENCE_SECONDS`. The pause of a call
# doubles up to the longest one.
PATIENCE_SECONDS = 600.0
PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
TRANSIENT = (408, 409, 429)
# The run ends after this many answers that cannot be read, because the server is paid for each.
UNREADABLE_IN_A_ROW = 5
UNREADABLE_OF_A_CALL = 3  # a text is dropped after this many, if other answers can be read
NOT_ACCEPTED = re.compile(
    r"unsupported|not support|not permitted|not allowed|unrecognized|unknown|unexpected|deprecated|only the default"
    r"|cannot both be",
    re.IGNORECASE,
)


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
    flaw: str | None = None  # why it has no text
    removed: tuple[str, ...] = ()  # what was around the text
    changed: tuple[str, ...] = ()  # parameters that the server does not take


class Answerer:
    continues = False  # whether an answer's text begins with its question

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        batch_size: int,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.batch_size = batch_size
        # An answer ends with the tokenizer's EOS, or with those of the model's generation config (end of turn).
        if model.generation_config is None:
            ends_of_config = None
        else:
            ends_of_config = model.generation_config.eos_token_id
        if isinstance(ends_of_config, list):
            listed = ends_of_config
        elif ends_of_config is None:
            listed = []
        else:
            listed = [ends_of_config]
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
            mask = pad_sequence(
                list(map(torch.ones_like, rows)), batch_first=True, padding_side="left"
            )
            processors = LogitsProcessorList()
            if self.sampling.temperature > 0:
                if self.sampling.top_p < 1:
                    narrowed = [TopPLogitsWarper(self.sampling.top_p)]
                else:
                    narrowed = []
                drawn = SeededDraws(
                    [seeds[number] for number in batch], length, self.sampling.max_new_tokens
                )
                processors += [TemperatureLogitsWarper(self.sampling.temperature), *narrowed, drawn]
            try:
                generated = self.model.generate(
                    input_ids=ids, attention_mask=mask, logits_processor=processors
                )
            except torch.OutOfMemoryError as problem:
                failure = f"out of GPU memory with {len(batch)} texts"
                raise ResourceError(f"{failure}. Lower --batch-size.") from problem
            for number, row in zip(
                batch, cast(Tensor, generated)[:, length:].tolist(), strict=True
            ):
                end = next((index for index, token in enumerate(row) if token in self.ends), None)
                begun = questions[number] if self.continues else ()
                text = str(self.tokenizer.decode([*begun, *row[:end]], skip_special_tokens=True))
                answers[number] = Answer(text.replace("\0", "").strip(), end is None)
        return [answers[number] for number in range(len(questions))]


class SeededDraws(LogitsProcessor):
    """Leave only the token chosen by the random numbers of each row's seed: transformers has one random stream for the
    whole batch, so a text's answer would depend on the other texts."""

    def __init__(self, seeds: Sequence[int], prompt_length: int, max_new_tokens: int) -> None:
        numbers = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)  # on the CPU: the same on any device
            numbers.append(torch.rand(max_new_tokens, generator=generator, dtype=torch.float64))
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
    concurrency: int  # calls at a time
    timeout: float  # seconds for a call

    def most_calls(self, calls: int) -> int:
        """The bound on calls, repeated ones included, whatever the server does."""
        return 2 * calls + 20

    @asynccontextmanager
    async def asking(self, sampling: Sampling, calls: int) -> AsyncIterator[Ask]:
        """Connect to the server for this number of calls and their repetitions."""
        try:
            # It takes a second.
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient
        except ImportError as problem:
            raise ResourceError(
                f"--endpoint needs the package openai: {install_line('rewriting')}"
            ) from problem
        key = next((os.environ[name] for name in KEYS if os.environ.get(name)), "no-key")
        # We repeat calls and follow no redirects, so that each request is counted.
        http = DefaultAsyncHttpxClient(follow_redirects=False)
        options: dict[str, Any] = {"timeout": self.timeout, "max_retries": 0, "http_client": http}
        async with AsyncOpenAI(base_url=self.url, api_key=key, **options) as client:
            connection = Connection(self, client, sampling, self.most_calls(calls))
            yield connection.ask


async def all_of(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; if one fails, cancel the others: nothing more is sent."""
    tasks = list(map(asyncio.create_task, work))
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class UnreadableAnswerError(Exception):
    """The server's answer has another shape than a chat completion."""


class Connection:
    """A run's connection to a server: the number of calls, their pace, and the parameters that the server takes."""

    def __init__(
        self, endpoint: Endpoint, client: Any, sampling: Sampling, most_calls: int
    ) -> None:
        self.endpoint = endpoint
        self.client = client
        self.slots = asyncio.Semaphore(endpoint.concurrency)
        self.calls = 0
        self.most_calls = most_calls
        self.parameters: dict[str, Any] = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
        }
        if sampling.temperature > 0:
            self.parameters["top_p"] = sampling.top_p
        self.changed: tuple[str, ...] = ()
        self.first_call = asyncio.Lock()
        self.was_read = False  # an answer of the server
        self.unreadable_in_a_row = 0
        self.last_answer = monotonic()
        # After two failures in a row, calls are sent with a gap between them; answers shorten it.
        self.gap_seconds = 0.0
        self.next_call = 0.0
        self.gap_changed = 0.0
        self.failures_in_a_row = 0

    async def ask(
        self, questions: Sequence[tuple[str, int]], take: Callable[[int, Answer], None]
    ) -> None:
        async def ask_one(number: int) -> None:
            async with self.slots:
                take(number, await self.answer(*questions[number]))

        async def ask_one_in_turn(number: int) -> None:
            # Until an answer can be read, calls are sent one at a time: they may all fail in the same way.
            if not self.was_read:
                async with self.first_call:
                    if not self.was_read:
                        await ask_one(number)
                        return
            await ask_one(number)

        await all_of(map(ask_one_in_turn, range(len(questions))))

    async def answer(self, prompt: str, seed: int) -> Answer:
        """Send the prompt as a chat until it is answered.

        Raises:
            LaunchError: the server refuses the call, or its answers cannot be read.
            Interrupted: nothing was answered for `PATIENCE_SECONDS`, or the bound on calls is reached.
        """
        from openai import APIError, APIStatusError

        pause_seconds = PAUSE_SECONDS
        unreadable = 0
        while True:
            await self.wait_for_turn()
            sent = monotonic()
            changed_before = self.changed
            try:
                answer = await self.send(prompt, seed)
            except UnreadableAnswerError as problem:
                unreadable += 1
                self.count_unreadable(problem)
                if unreadable == UNREADABLE_OF_A_CALL and self.was_read:
                    return Answer("", False, flaw="unreadable", changed=self.changed)
                log.info(f"{self.endpoint.url}: {problem}; trying again")
            except APIStatusError as problem:
                if problem.status_code < 500 and problem.status_code not in TRANSIENT:
                    if (
                        "content_filter" in problem.response.text
                        or "content management policy" in str(problem)
                    ):
                        return Answer("", False, flaw="refusal", changed=self.changed)
                    if not self.change_parameter(problem) and self.changed == changed_before:
                        remedy = f"Correct --endpoint, --model, the key in {' or '.join(KEYS)}, or --max-input-tokens."
                        reason = self.quote(problem)
                        raise LaunchError(
                            f"{self.endpoint.url} refuses a call: {reason} {remedy}"
                        ) from problem
                    continue
                self.slow_down(sent, wished_pause(problem.response.headers.get("Retry-After")))
                self.check_patience(problem)
            except (APIError, TimeoutError) as problem:
                self.slow_down(sent, 0.0)
                self.check_patience(problem)
            else:
                self.was_read = True
                self.unreadable_in_a_row = self.failures_in_a_row = 0
                self.last_answer = monotonic()
                self.gap_seconds *= 0.9
                return answer
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)

    async def wait_for_turn(self) -> None:
        now = monotonic()
        turn = max(now, self.next_call)
        self.next_call = turn + self.gap_seconds
        await asyncio.sleep(turn - now)

    async def send(self, prompt: str, seed: int) -> Answer:
        if self.calls >= self.most_calls:
            raise Interrupted(
                f"{self.endpoint.url}: {self.calls:,} calls were sent, the most for this run, because many failed."
                " Finished answers are kept: repeat the command to resume."
            )
        self.calls += 1
        parameters = dict(self.parameters)
        if "without seed" not in self.changed:
            parameters["seed"] = seed
        changed = self.changed
        messages = [{"role": "user", "content": prompt.strip()}]
        create = self.client.chat.completions.with_raw_response.create
        # The client's own limit is one for each read of the connection.
        async with asyncio.timeout(self.endpoint.timeout):
            raw = await create(model=self.endpoint.model, messages=messages, **parameters)
        return replace(read_answer(raw.text), changed=changed)

    def count_unreadable(self, problem: UnreadableAnswerError) -> None:
        self.unreadable_in_a_row += 1
        if self.unreadable_in_a_row >= UNREADABLE_IN_A_ROW:
            raise LaunchError(
                f"{self.endpoint.url}: {self.unreadable_in_a_row} answers in a row cannot be read: "
                f"{self.quote(problem)} Correct --endpoint (an OpenAI-compatible server, usually with /v1 at the end)"
                " or --model; for a reasoning model switch thinking off in the server or raise --max-new-tokens."
            ) from problem

    def change_parameter(self, problem: Any) -> bool:
        """Rename or leave out the parameter that the server refuses; False if it refuses another thing."""
        reason = str(problem)
        if problem.status_code not in (400, 422):
            return False
        if "max_completion_tokens" in reason and "max_tokens" in self.parameters:
            self.parameters["max_completion_tokens"] = self.parameters.pop("max_tokens")
            self.report_change("with max_completion_tokens in place of max_tokens")
            return True
        if not NOT_ACCEPTED.search(reason):
            return False
        for name in ("top_p", "temperature", "seed"):
            is_named = problem.param == name or (
                problem.param is None and re.search(rf"\b{name}\b", reason)
            )
            if is_named and f"without {name}" not in self.changed:
                self.parameters.pop(name, None)
                self.report_change(f"without {name}")
                return True
        return False

    def report_change(self, change: str) -> None:
        self.changed += (change,)
        log.warning(f"{self.endpoint.url} refuses a parameter. All calls are now {change}")

    def slow_down(self, sent: float, wished_seconds: float) -> None:
        """Send fewer calls after a failure of a call that was sent since the last change of the gap."""
        self.failures_in_a_row += 1
        seconds_now = monotonic()
        if self.failures_in_a_row > 1 and sent > self.gap_changed:
            self.gap_seconds = min(
                max(2 * self.gap_seconds, PAUSE_SECONDS / 20), LONGEST_PAUSE_SECONDS
            )
            self.gap_changed = seconds_now
        self.next_call = max(
            self.next_call, seconds_now + min(wished_seconds, LONGEST_PAUSE_SECONDS)
        )

    def check_patience(self, problem: Exception) -> None:
        reason = self.quote(problem) or "no answer within --timeout"
        if monotonic() - self.last_answer > PATIENCE_SECONDS:
            again = "Finished answers are kept: repeat the command to resume."
            raise Interrupted(
                f"{self.endpoint.url}: no call was answered for minutes: {reason} {again}"
            ) from problem
        log.info(f"{self.endpoint.url}: {reason}; trying again")

    def quote(self, problem: Exception) -> str:
        return " ".join(str(problem).replace(self.client.api_key, "***").split())[:500]


def wished_pause(header: str | None) -> float:
    """The seconds of a Retry-After header; 0 if it has a date or nothing."""
    try:
        return max(0.0, float(header or 0))
    except ValueError:
        return 0.0


def read_answer(body: str) -> Answer:
    """The text of a completion in JSON.

    Raises:
        UnreadableAnswerError: it has another shape.
    """
    choice, model = first_choice(body)
    reason = choice.get("finish_reason")
    if reason in ("abort", "error"):  # of servers that shut down
        raise UnreadableAnswerError(f"the server ended an answer with `{reason}`.")
    message = choice.get("message")
    if not isinstance(message, dict):
        raise UnreadableAnswerError(
            f"expected `choices[0].message` with an object; {begin_of(body)}"
        )
    answer = Answer("", reason == "length", model)
    content = message.get("content")
    has_refusal = isinstance(message.get("refusal"), str) and message["refusal"]
    if reason == "content_filter" or has_refusal:
        return replace(answer, flaw="refusal")
    thoughts = any(map(message.get, ("reasoning_content", "reasoning", "thinking")))
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, dict) else "text" for part in content]
        thoughts = thoughts or any(kind in ("thinking", "reasoning") for kind in kinds)
        if "refusal" in kinds:
            return replace(answer, flaw="refusal")
        content = join_parts(content)
        if content is None and not thoughts:
            raise UnreadableAnswerError(
                f"`choices[0].message.content` is a list without text; {begin_of(body)}"
            )
    if content is None and not thoughts:
        raise UnreadableAnswerError(
            f"`choices[0].message.content` is null (finish_reason: {reason})."
        )
    if not isinstance(content, str | None):
        kind = type(content).__name__
        raise UnreadableAnswerError(
            f"`choices[0].message.content` is of the type {kind}, expected a text; {begin_of(body)}"
        )
    text = (content or "").encode(errors="replace").decode().replace("\0", "").strip()
    if thoughts:
        answer = replace(answer, removed=("thoughts in a field of their own",))
    if thoughts and not text:
        return replace(answer, flaw="only thoughts")
    return replace(answer, text=text)


def first_choice(body: str) -> tuple[dict[str, Any], str | None]:
    """The first choice of a completion, and the name of the model."""
    try:
        completion = json.loads(body)
    except ValueError as problem:
        raise UnreadableAnswerError(f"expected JSON; {begin_of(body)}") from problem
    choices = completion.get("choices") if isinstance(completion, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise UnreadableAnswerError(f"expected `choices` with an entry; {begin_of(body)}")
    model = completion.get("model")
    return choice, model if isinstance(model, str) else None


def begin_of(body: str) -> str:
    return f"the answer begins with `{body[:200]}`."


def join_parts(parts: Sequence[Any]) -> str | None:
    """The texts of a content in parts; None if there is none."""
    texts = []
    for part in parts:
        text = part
        if isinstance(part, dict):
            text = part.get("text") if part.get("type") in ("text", "output_text") else None
        if isinstance(text, str):
            texts.append(text)
    if texts:
        return "".join(texts)
    return None


class RewriteQuestion:
    """A tokenizer's chat format around a question. `<|im_end|>` in a document is encoded as plain text, so a document
    cannot end its turn of the chat."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.is_chat = tokenizer.chat_template is not None
        self.head = list[int]()
        self.tail = list[int]()
        if self.is_chat:
            # Thinking is disabled, an option of Qwen3.
            message = [{"role": "user", "content": PLACE}]
            chat = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            before, placeholder, after = str(chat).partition(PLACE)
            if not placeholder:
                name = tokenizer.name_or_path
                raise RecipeError(
                    f"the chat template of `{name}` omits the user's message. Choose another --model."
                )
            self.head = encode(tokenizer, before, as_text=False)
            self.tail = encode(tokenizer, after, as_text=False)
        elif adds_bos(tokenizer) and tokenizer.bos_token_id is not None:
            self.head = [int(tokenizer.bos_token_id)]

    def ids(self, question: str) -> list[int]:
        return [
            *self.head,
            *encode(self.tokenizer, question.strip() if self.is_chat else question),
            *self.tail,
        ]


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, as_text: bool = True) -> list[int]:
    """Encode a text. With `as_text`, special tokens in it are encoded as plain text."""
    return list(
        tokenizer(text, add_special_tokens=False, split_special_tokens=as_text)["input_ids"]
    )


def cut(
    text: str, max_tokens: int, count: Callable[[str], int], separators: Sequence[str] = SEPARATORS
) -> list[str]:
    """Cut a text into pieces of at most `max_tokens` tokens, as `count` counts them: at ends of paragraphs, or lines,
    sentences, words."""
    if count(text) <= max_tokens:
        return [text]
    if not separators:
        half = len(text) // 2
        if not half:
            return [text]
        return [
            *cut(text[:half], max_tokens, count, ()),
            *cut(text[half:], max_tokens, count, ()),
        ]
    separator, *finer = separators
    parts = [part + separator for part in text.split(separator)]
    parts[-1] = parts[-1].removesuffix(separator)
    pieces = [""]
    tokens_left = max_tokens
    for part in parts:
        length = count(part)
        if length > tokens_left and pieces[-1]:
            pieces.append("")
            tokens_left = max_tokens
        pieces[-1] += part
        tokens_left -= length
    non_empty_pieces = [piece.strip() for piece in pieces if piece.strip()]
    small_pieces = []
    for piece in non_empty_pieces:
        small_pieces += cut(piece, max_tokens, count, finer)
    return small_pieces
