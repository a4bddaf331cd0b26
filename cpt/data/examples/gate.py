"""What is wrong with examples before a run spends its time on them: every row is written and encoded as the run would
do it."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from cpt.data.examples.chat_template import ASSISTANT
from cpt.data.examples.encoder import ExampleEncoder
from cpt.data.examples.segments import CONTEXT, LEARNED, LONG_PROMPT, NOTHING_LEARNED, UNWANTED, Segments
from cpt.data.filters.filters import ComponentLists, build_filters, build_transforms, sift
from cpt.data.readers.chat import Message
from cpt.data.readers.documents import Document, Origin, Piece
from cpt.data.readers.example import Example, Words, example_of
from cpt.data.readers.sources import read_piece
from cpt.data.store.parallel import map_in_order
from cpt.data.store.shards import batches
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import DocumentSource

NO_END = "no token that ends a turn is learned"
MASKED = "all labels masked"
TRUNCATED = "longer than sequence_length"
EMPTY = "empty answer"
ECHO = "prompt = answer"
SAME = "chosen = rejected"
REPEATED = "duplicate row"
DROPPED = "dropped: "
WRONG = (NO_END, MASKED, EMPTY, ECHO, SAME)
"""Kinds of which a single row is a mistake."""
CUT = (TRUNCATED, NOTHING_LEARNED, LONG_PROMPT)
"""Kinds of which a small share is none."""
LISTED = 20  # rows of each kind
LAST = 3  # tokens of a turn among which its end is: blanks may follow it
CONTROL_LIKE = re.compile(r"<\|[\w.-]+\|>|<｜[^｜>\s]+｜>|<(?:start|end)_of_turn>|\[/?INST\]")
WORKERS_IMPORT = ("cpt.data.examples.gate", "transformers.utils.chat_template_utils")
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
        is_first = np.zeros(len(self.hashes), bool)
        is_first[first] = True
        for number in np.flatnonzero(~is_first).tolist():
            self.find(REPEATED, self.places[number])

    def where(self, kind: str, most: int) -> list[str]:
        return [origin.where(number) for origin, number in self.rows[kind][:most]]


@dataclass(frozen=True)
class Inspector:
    """Looks through pieces of a source; travels to worker processes."""

    source: DocumentSource
    key: str
    filters: ComponentLists
    transforms: ComponentLists
    encoder: ExampleEncoder
    sequence_length: int

    def __call__(self, piece: Piece) -> ExampleReport:
        found = ExampleReport()
        for batch in batches(
            self.examples(islice(read_piece(self.source, piece, self.key), self.source.max_documents), found)
        ):
            self.inspect(
                [text for text, _ in batch], [(document.origin, document.number) for _, document in batch], found
            )
        return found

    def examples(self, items: Iterator[object], found: ExampleReport) -> Iterator[tuple[str, Document]]:
        """What the run would train on; examples that the template does not take are counted."""
        transforms, filters = build_transforms(self.transforms), build_filters(self.filters)
        for item in items:
            if not isinstance(item, Document):
                continue
            view = {"text": item.text, "source": reported_name(self.source), "where": item.near}
            for text, dropped in sift(view, transforms, filters):
                if dropped is not None:
                    continue
                if (refusal := self.encoder.reason_to_drop(text)) is not None:
                    found.find(f"{DROPPED}{refusal}", (item.origin, item.number))
                else:
                    yield text, item

    def inspect(self, texts: Sequence[str], places: Sequence[Place], found: ExampleReport) -> None:
        found.examples += len(texts)
        found.hashes += [xxh3_64_intdigest(text.encode()) for text in texts]
        found.places += places
        for text, place in zip(texts, places, strict=True):
            for kind in faults_of_words(example_of(text)):
                found.find(kind, place)
        ids, lengths, segments = self.encoder.encode_segments(texts)
        control = [*self.encoder.control_tokens.values(), self.encoder.eos]
        if self.encoder.form != "prompt":
            for number in unended(lengths, segments, np.isin(ids, control)):
                found.find(NO_END, places[number])
        for kind, numbers in faults_of_length(lengths, segments, self.encoder.form, self.sequence_length).items():
            for number in numbers:
                found.find(kind, places[number])


def inspect_source(inspector: Inspector, pieces: Sequence[Piece], workers: int) -> ExampleReport:
    found = ExampleReport()
    if inspector.source.max_documents is not None:  # counted from the first on
        pieces, workers = pieces[:1], 0
    for part in map_in_order(lambda: inspector, pieces, workers, WORKERS_IMPORT):
        found.add(part)
    found.find_repeated()
    return found


def missing_tokens(encoder: ExampleEncoder) -> list[str]:
    """What looks like a control token in the chat template, and is none of the tokenizer's tokens."""
    written = dict.fromkeys(CONTROL_LIKE.findall(encoder.template or ""))
    return [token for token in written if token not in encoder.control_tokens and encoder.id_of(token) is None]


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
    if example.columns is not None and isinstance(example.prompt, str) and not example.prompt.strip():
        yield "empty prompt"


def answers(example: Example) -> Iterator[tuple[str, str]]:
    """What is learned, each with what was said before it."""
    prompt = last_words(example.prompt)
    if isinstance(example.messages, list):
        yield from spoken(example.messages, "")
    for words in (example.completion, example.chosen, example.rejected):
        if isinstance(words, str):
            yield prompt, words
        elif words is not None:
            yield from spoken(words, prompt)


def spoken(messages: Sequence[Message], before: str) -> Iterator[tuple[str, str]]:
    """The assistant's messages, but for calls of tools, each with the message before it."""
    for message in messages:
        content = message["content"] or ""
        if message["role"] == ASSISTANT and not message.get("tool_calls"):
            yield before, content
        before = content


def last_words(words: Words | None) -> str:
    if isinstance(words, list):
        return words[-1]["content"] or ""
    return words or ""


def unended(lengths: NDArray[np.int64], segments: Segments, is_control: NDArray[np.bool_]) -> list[int]:
    """The examples of which some turn is learned without a token that ends it."""
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
    lengths: NDArray[np.int64], segments: Segments, form: str, sequence_length: int
) -> dict[str, list[int]]:
    """Examples that are cut, or of which nothing is left to learn."""
    begins = lengths.cumsum() - lengths
    context, learned, unwanted = (
        np.add.reduceat(segments == one, begins, dtype=np.int64) for one in (CONTEXT, LEARNED, UNWANTED)
    )
    if form == "conversation":
        bounds = zip(begins, begins + lengths, strict=True)
        first = np.array([np.argmax(segments[begin + 1 : end] == LEARNED) + 1 for begin, end in bounds])
        learned -= segments[begins] == LEARNED  # of the first token nothing is predicted
        lost = (learned > 0) & (first >= sequence_length)
        kinds = {
            MASKED: learned == 0,
            NOTHING_LEARNED: lost,
            TRUNCATED: (lengths > sequence_length) & ~lost & (learned > 0),
        }
    else:
        lost = context > sequence_length if form == "prompt" else context >= sequence_length
        kinds = {LONG_PROMPT: lost, TRUNCATED: (context + np.maximum(learned, unwanted) > sequence_length) & ~lost}
    return {kind: np.flatnonzero(which).tolist() for kind, which in kinds.items()}
