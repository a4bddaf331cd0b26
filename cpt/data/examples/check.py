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

    def find(self, kind: str, place: Place) -> None:
        self.counts[kind] += 1
        rows = self.rows.setdefault(kind, [])
        if len(rows) < LISTED:
            rows.append(place)

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
            self.find(REPEATED, self.places[number])

    def where(self, kind: str, most: int) -> list[str]:
        return [origin.where(number) for origin, number in self.rows[kind][:most]]


@dataclass(frozen=True)
class Inspector:
    """Checks a source's examples; pickled to worker processes."""

    encoder: ExampleEncoder
    sequence_length: int
    are_repeats_wrong: bool = True

    def __call__(self, examples: Iterator[tuple[str, Document]]) -> ExampleReport:
        found, form = ExampleReport(), self.encoder.form
        control = [*self.encoder.control_tokens.values(), self.encoder.eos]
        for batch in batches(examples):
            texts = [text for text, _ in batch]
            places = [(document.origin, document.number) for _, document in batch]
            found.examples += len(texts)
            found.hashes += [xxh3_64_intdigest(text.encode()) for text in texts]
            found.places += places
            for text, place in zip(texts, places, strict=True):
                for kind in faults_of_words(example_of(text)):
                    found.find(kind, place)
            ids, lengths, segments = self.encoder.encode_segments(texts)
            faults = faults_of_length(lengths, segments, form, self.sequence_length)
            if form != "prompt":
                faults = {NO_END: unended(lengths, segments, np.isin(ids, control)), **faults}
            for kind, numbers in faults.items():
                for number in numbers:
                    found.find(kind, places[number])
        return found


def missing_tokens(encoder: ExampleEncoder) -> list[str]:
    """Strings that look like control tokens in the chat template, but are not tokens of the tokenizer."""
    written = dict.fromkeys(CONTROL_LIKE.findall(encoder.template or ""))
    return [
        token
        for token in written
        if token not in encoder.control_tokens and encoder.id_of(token) is None
    ]


def faults_of_words(example: Example | None) -> Iterator[str]:
    if example is None:
        return
    pairs = list(answers(example))
    if any(not answer.strip() for _, answer in pairs):
        yield EMPTY
    if any(answer.strip() and answer.strip() == prompt.strip() for prompt, answer in pairs):
        yield ECHO
    if example.chosen is not None and example.chosen == example.rejected:
        yield SAME
    if (
        example.columns is not None
        and isinstance(example.prompt, str)
        and not example.prompt.strip()
    ):
        yield "empty prompt"


def answers(example: Example) -> Iterator[tuple[str, str]]:
    """The learned texts, each with the text before it."""
    prompt = example.prompt[-1]["content"] if isinstance(example.prompt, list) else example.prompt
    if isinstance(example.messages, list):
        yield from spoken(example.messages, "")
    for words in (example.completion, example.chosen, example.rejected):
        if isinstance(words, str):
            yield prompt or "", words
        elif words is not None:
            yield from spoken(words, prompt or "")


def spoken(messages: Sequence[Message], before: str) -> Iterator[tuple[str, str]]:
    """The assistant's messages except tool calls, each with the message before it."""
    for message in messages:
        content = message["content"] or ""
        if message["role"] == ASSISTANT and not message.get("tool_calls"):
            yield before, content
        before = content


def unended(lengths: Int64, segments: Segments, is_control: Mask) -> list[int]:
    """The examples with a learned turn that lacks a token to end it."""
    bounds = lengths.cumsum()
    number_of = np.repeat(np.arange(len(lengths)), lengths)
    last = np.append((segments[1:] != segments[:-1]) | (number_of[1:] != number_of[:-1]), True)
    at = np.flatnonzero(last & ((segments == LEARNED) | (segments == UNWANTED)))
    begins = np.append(0, np.flatnonzero(last) + 1)
    begin = begins[np.searchsorted(begins, at, "right") - 1]
    ended = np.zeros(len(at), bool)
    for back in range(LAST):
        ended |= is_control[np.maximum(at - back, begin)]
    return sorted({int(np.searchsorted(bounds, place, "right")) for place in at[~ended].tolist()})


def faults_of_length(
    lengths: Int64, segments: Segments, form: str, sequence_length: int
) -> dict[str, list[int]]:
    begins = lengths.cumsum() - lengths
    kinds_of_ids = (segments == kind for kind in (CONTEXT, LEARNED, UNWANTED))
    context, learned, unwanted = (
        np.add.reduceat(one, begins, dtype=np.int64) for one in kinds_of_ids
    )
    if form == "conversation":
        bounds = zip(begins, begins + lengths, strict=True)
        first = np.array(
            [np.argmax(segments[begin + 1 : end] == LEARNED) + 1 for begin, end in bounds]
        )
        learned -= segments[begins] == LEARNED  # the first token is never predicted
        lost = (learned > 0) & (first >= sequence_length)
        is_cut = (lengths > sequence_length) & ~lost & (learned > 0)
        kinds = {MASKED: learned == 0, NOTHING_LEARNED: lost, TRUNCATED: is_cut}
    else:
        lost = context > sequence_length if form == "prompt" else context >= sequence_length
        kinds = {
            LONG_PROMPT: lost,
            TRUNCATED: (context + np.maximum(learned, unwanted) > sequence_length) & ~lost,
        }
    return {kind: np.flatnonzero(which).tolist() for kind, which in kinds.items()}
