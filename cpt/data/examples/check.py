"""Check examples: every row is rendered and encoded as in a run, and its faults are counted."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from xxhash import xxh3_64_intdigest

from cpt.data.examples.chat_template import ASSISTANT
from cpt.data.examples.encoder import (
    CONTEXT,
    LEARNED,
    LONG_PROMPT,
    NOTHING_LEARNED,
    UNWANTED,
    ExampleEncoder,
    Segments,
)
from cpt.data.readers.documents import Document, Origin
from cpt.data.readers.example import Example, Message, example_of
from cpt.data.store.shards import batches
from cpt.data.store.token_files import Int64, Mask

NO_END = "no token that ends a turn is learned"
MASKED = "all labels masked"
TRUNCATED = "longer than sequence_length"
EMPTY = "empty answer"
ECHO = "prompt = answer"
SAME = "chosen = rejected"
REPEATED = "duplicate row"
DROPPED = "dropped: "
WRONG = (NO_END, MASKED, EMPTY, ECHO, SAME)  # errors even in a single row
CUT = (TRUNCATED, NOTHING_LEARNED, LONG_PROMPT)  # acceptable in a small share of rows
LISTED = 20  # rows listed per kind
LAST = 3  # last tokens of a turn that may be its end: blanks may follow it
CONTROL_LIKE = re.compile(r"<\|[\w.-]+\|>|<｜[^｜>\s]+｜>|<(?:start|end)_of_turn>|\[/?INST\]")
WORKERS_IMPORT = ("cpt.data.examples.check", "transformers.utils.chat_template_utils")
Place = tuple[Origin, int]


@dataclass
class ExampleReport:
    examples: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    rows: dict[str, list[Place]] = field(default_factory=dict)
    hashes: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)

    def count(self, kind: str, row: Place) -> None:
        self.counts[kind] += 1
        rows = self.rows.setdefault(kind, [])
        if len(rows) < LISTED:
            rows.append(row)

    def add(self, other: "ExampleReport") -> None:
        self.examples += other.examples
        self.counts.update(other.counts)
        for kind, places in other.rows.items():
            self.rows[kind] = (self.rows.get(kind, []) + places)[:LISTED]
        self.hashes += other.hashes
        self.places += other.places

    def find_repeated(self) -> None:
        _, first = np.unique(np.array(self.hashes, np.uint64), return_index=True)
        for number in np.setdiff1d(np.arange(len(self.hashes)), first).tolist():
            self.count(REPEATED, self.places[number])

    def where(self, kind: str, max_rows: int) -> list[str]:
        return [origin.where(number) for origin, number in self.rows[kind][:max_rows]]


@dataclass(frozen=True)
class Inspector:
    """Checks a source's examples; pickled to worker processes."""

    encoder: ExampleEncoder
    sequence_length: int
    are_repeats_wrong: bool = True

    def __call__(self, examples: Iterator[tuple[str, Document]]) -> ExampleReport:
        report = ExampleReport()
        form = self.encoder.form
        control_ids = [*self.encoder.control_tokens.values(), self.encoder.eos]
        for batch in batches(examples):
            texts = [text for text, _ in batch]
            places = [(document.origin, document.number) for _, document in batch]
            report.examples += len(texts)
            report.hashes += [xxh3_64_intdigest(text.encode()) for text in texts]
            report.places += places
            for text, place in zip(texts, places, strict=True):
                for kind in faults_of_words(example_of(text)):
                    report.count(kind, place)
            ids, lengths, segments = self.encoder.encode_segments(texts)
            faults: dict[str, list[int]] = {}
            if form != "prompt":
                faults[NO_END] = unended(lengths, segments, np.isin(ids, control_ids))
            faults |= faults_of_length(lengths, segments, form, self.sequence_length)
            for kind, numbers in faults.items():
                for number in numbers:
                    report.count(kind, places[number])
        return report


def missing_tokens(encoder: ExampleEncoder) -> list[str]:
    """Strings that look like control tokens in the chat template, but are not tokens of the tokenizer."""
    missing = []
    for token in dict.fromkeys(CONTROL_LIKE.findall(encoder.template or "")):
        if token not in encoder.control_tokens and encoder.id_of(token) is None:
            missing.append(token)
    return missing


def faults_of_words(example: Example | None) -> Iterator[str]:
    if example is None:
        return
    is_empty = False
    is_echo = False
    for prompt, answer in answers(example):
        stripped = answer.strip()
        if not stripped:
            is_empty = True
        elif stripped == prompt.strip():
            is_echo = True
    if is_empty:
        yield EMPTY
    if is_echo:
        yield ECHO
    if example.chosen is not None and example.chosen == example.rejected:
        yield SAME
    only_prompt = example.prompt
    if example.columns is not None and isinstance(only_prompt, str) and not only_prompt.strip():
        yield "empty prompt"


def answers(example: Example) -> Iterator[tuple[str, str]]:
    """The learned texts, each with the text before it."""
    prompt = example.prompt[-1]["content"] if isinstance(example.prompt, list) else example.prompt
    if isinstance(example.messages, list):
        yield from spoken(example.messages, "")
    for answer in (example.completion, example.chosen, example.rejected):
        if isinstance(answer, str):
            yield prompt or "", answer
        elif answer is not None:
            yield from spoken(answer, prompt or "")


def spoken(messages: Sequence[Message], before: str) -> Iterator[tuple[str, str]]:
    """The assistant's messages except tool calls, each with the message before it."""
    for message in messages:
        content = message["content"] or ""
        if message["role"] == ASSISTANT and not message.get("tool_calls"):
            yield before, content
        before = content


def unended(lengths: Int64, segments: Segments, is_control: Mask) -> list[int]:
    """The examples with a learned turn that lacks a token to end it."""
    example_of_token = np.repeat(np.arange(len(lengths)), lengths)
    is_other_segment = segments[1:] != segments[:-1]
    is_other_example = example_of_token[1:] != example_of_token[:-1]
    is_last = np.append(is_other_segment | is_other_example, True)  # of a turn
    last_tokens = np.flatnonzero(is_last & ((segments == LEARNED) | (segments == UNWANTED)))
    turn_begins = np.append(0, np.flatnonzero(is_last) + 1)
    begins = turn_begins[np.searchsorted(turn_begins, last_tokens, "right") - 1]
    is_ended = np.zeros(len(last_tokens), bool)
    for distance in range(LAST):
        is_ended |= is_control[np.maximum(last_tokens - distance, begins)]
    numbers: list[int] = np.unique(example_of_token[last_tokens[~is_ended]]).tolist()
    return numbers


def faults_of_length(
    lengths: Int64, segments: Segments, form: str, sequence_length: int
) -> dict[str, list[int]]:
    begins = lengths.cumsum() - lengths
    ends = begins + lengths

    def count_tokens(segment: int) -> Int64:
        counts: Int64 = np.add.reduceat(segments == segment, begins, dtype=np.int64)
        return counts

    learned = count_tokens(LEARNED)
    if form == "conversation":
        first_learned = np.empty_like(lengths)
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            first_learned[number] = np.argmax(segments[begin + 1 : end] == LEARNED) + 1
        learned[segments[begins] == LEARNED] -= 1  # the first token is never predicted
        is_lost = (learned > 0) & (first_learned >= sequence_length)
        is_cut = (lengths > sequence_length) & (learned > 0) & ~is_lost
        faults = {MASKED: learned == 0, NOTHING_LEARNED: is_lost, TRUNCATED: is_cut}
    else:
        context = count_tokens(CONTEXT)
        completion = np.maximum(learned, count_tokens(UNWANTED))
        is_lost = context > sequence_length if form == "prompt" else context >= sequence_length
        is_cut = (context + completion > sequence_length) & ~is_lost
        faults = {LONG_PROMPT: is_lost, TRUNCATED: is_cut}
    return {kind: np.flatnonzero(has_fault).tolist() for kind, has_fault in faults.items()}
