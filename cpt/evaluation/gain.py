"""What is the gain on a held-out set made of? Lines that most of its documents share, and phrases of training text."""

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from xxhash import xxh3_64_intdigest

from cpt.data.readers.comparing import COMPARISON
from cpt.data.readers.decontamination import COMPARISONS, WORDS, runs_of
from cpt.data.readers.filters import lines_of
from cpt.data.readers.shared_lines import EXCERPT, SharedLines
from cpt.data.rows.packing import PackedRows
from cpt.data.store.token_files import Hashes
from cpt.data.store.tokenization import DocumentEncoder
from cpt.evaluation.scoring import (
    ScoredBatch,
    scored_batches,
    spread_over_tokens,
    starts_of_pieces,
    sum_over_processes,
)
from cpt.evaluation.sets import EvaluationSet

LEAST = 0.1  # share of the gain; less is not reported
MOST = 0.5  # share of the gain; more is reported with the result
LINES, PHRASES, OTHER = range(3)
UNKNOWN = 3  # tokens of a document whose characters cannot be located
# A character that is a word, or the text between two blanks: several words may have the same place.
PLACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+")

Spans = list[tuple[int, int]]  # of characters
Nats = NDArray[np.float64]


@dataclass(frozen=True)
class MarkedSet:
    """A held-out set with the part that each of its tokens belongs to: `LINES`, `PHRASES`, `OTHER` or `UNKNOWN`."""

    held_out: EvaluationSet
    parts: NDArray[np.uint8]  # by the number of the token in the source
    line: str  # the shared line with most characters; empty without any
    unknown: int  # documents whose tokens are `UNKNOWN`


@dataclass(frozen=True)
class Gain:
    set_name: str
    lines: float  # share of the gain, in nats, from lines that most documents share
    phrases: float  # share from runs of words that training documents have, outside these lines
    line: str
    unknown: int = 0  # documents that are not part of this, because their tokens cannot be located

    @property
    def is_copied(self) -> bool:
        """Whether most of the gain may be learned by heart."""
        return self.phrases > MOST

    def sentences(self) -> list[str]:
        sentences = []
        if self.lines > LEAST:
            sentences.append(
                f"`{self.set_name}`: {percent(self.lines)} of the gain is in lines that most documents share, such"
                f" as `{self.line}`. `cpt data check` lists them, with the transform that drops them."
            )
        if self.phrases > LEAST:
            sentences.append(
                f"`{self.set_name}`: {percent(self.phrases)} of the gain is in phrases of {WORDS} or more words"
                " that training documents also have, which may be learned by heart."
            )
        if sentences and self.unknown:
            sentences[-1] += f" {self.unknown:,} documents are not counted: their tokens differ."
        return sentences


def percent(share: float) -> str:
    """At most 100 %: the loss of the other parts may have risen."""
    return f"{100 * min(1, share):.0f} %"


def mark_set(held_out: EvaluationSet, encoder: DocumentEncoder, copied: Hashes) -> MarkedSet | None:
    """Find the shared lines of a set, and the phrases of which training documents have a copy; None without any.

    Args:
        copied: runs of words of held-out documents that training documents have, sorted.
    """
    shared = SharedLines()
    for text, _ in held_out.texts():
        shared.add(text)
    lines = shared.found()
    documents = cast(PackedRows, held_out.rows.rows).documents
    offsets = documents.offsets
    numbers = {digest: number for number, digest in enumerate(documents.hashes.tolist())}
    parts = np.full(documents.num_tokens, UNKNOWN, np.uint8)
    for text, _ in held_out.texts():
        number = numbers[xxh3_64_intdigest(text.encode())]
        begin, end = offsets[number : number + 2].tolist()
        stored = documents.tokens(begin, end - begin)
        of_tokens = parts_of_tokens(encoder, text, parts_of_text(text, lines, copied), stored)
        if of_tokens is not None:
            parts[begin:end] = of_tokens
    if not np.isin(parts, (LINES, PHRASES)).any():
        return None
    # All tokens of a document are unknown, or none, so its first one shows it.
    first_parts = parts[offsets[held_out.rows.chosen]]
    return MarkedSet(
        held_out=held_out,
        parts=parts,
        line=" ".join(next(iter(lines), "")[:EXCERPT].split()),
        unknown=int((first_parts == UNKNOWN).sum()),
    )


def parts_of_text(text: str, lines: Container[str], copied: Hashes) -> NDArray[np.uint8]:
    """The part of each character; a character of a shared line and of a phrase is of the line."""
    parts = np.full(len(text) + 1, OTHER, np.uint8)
    for first, last in copied_spans(text, copied):
        parts[first:last] = PHRASES
    for first, last in line_spans(text, lines):
        parts[first:last] = LINES
    return parts


def line_spans(text: str, lines: Container[str]) -> Iterator[tuple[int, int]]:
    """The shared paragraphs and lines of a text, as `drop_lines` finds them."""
    begin = 0
    for paragraph in text.split("\n\n"):
        if "\n".join(lines_of(paragraph)) in lines:
            yield begin, begin + len(paragraph)
        first = begin
        for line in paragraph.split("\n"):
            if " ".join(line.split()) in lines:
                yield first, first + len(line)
            first += len(line) + 1
        begin += len(paragraph) + 2


def copied_spans(text: str, copied: Hashes) -> Iterator[tuple[int, int]]:
    if not len(copied):
        return
    words: list[bytes] = []
    spans: Spans = []  # of each word
    for match in PLACED.finditer(text):
        words_of_match = COMPARISONS[COMPARISON](match.group())
        words += words_of_match
        spans += [match.span()] * len(words_of_match)
    if len(words) < WORDS:
        return
    for first in np.flatnonzero(np.isin(runs_of(words), copied)).tolist():
        begin, _ = spans[first]
        _, end = spans[first + WORDS - 1]
        yield begin, end


def parts_of_tokens(
    encoder: DocumentEncoder,
    text: str,
    of_text: NDArray[np.uint8],
    stored: NDArray[np.unsignedinteger],
) -> NDArray[np.uint8] | None:
    """The part of each stored token, which is that of its last character; None if the text has other tokens."""
    encoding = encoder.fast_tokenizer.encode(text, add_special_tokens=False)
    ids = np.array(encoding.ids, stored.dtype)
    document, _ = encoder.between_bos_and_eos(ids, np.array([len(ids)]))
    if not np.array_equal(document, stored):
        return None
    parts = np.full(len(stored), OTHER, np.uint8)
    begin = len(stored) - len(ids) - 1  # after the begin token, if there is one
    ends = np.array([end for _, end in encoding.offsets], np.int64)
    parts[begin:-1] = of_text[np.maximum(ends - 1, 0)]
    return parts


def nats_of_parts(model: nn.Module, marked: MarkedSet, batch_size: int) -> Nats:
    """The loss of each part, [LINES, PHRASES, OTHER], summed over all documents and processes."""
    rows = cast(PackedRows, marked.held_out.rows.rows)
    parts = torch.from_numpy(marked.parts)
    device = next(model.parameters()).device
    sums = torch.zeros(UNKNOWN + 1, dtype=torch.float64, device=device)
    for batch in scored_batches(model, marked.held_out.rows, batch_size):
        part = parts[numbers_of_tokens(batch, rows)].to(device)  # (B, T - 1)
        nats = (batch.nats * batch.is_predicted).double()
        sums.index_add_(0, part.flatten().int(), nats.flatten())
    sum_over_processes(sums)
    return sums[:UNKNOWN].cpu().numpy()


def numbers_of_tokens(batch: ScoredBatch, rows: PackedRows) -> torch.Tensor:
    """(B, T - 1): the number of each predicted token in the source; undefined for padding."""
    begins = spread_over_tokens(batch, starts_of_pieces(batch, rows))
    return (begins + batch.position_ids)[:, 1:].clamp(max=rows.documents.num_tokens - 1)


def gain_of(marked: MarkedSet, before: Nats, after: Nats) -> Gain | None:
    """None if the loss of the whole set did not fall."""
    gained = before - after
    if gained.sum() <= 0:
        return None
    shares = gained / gained.sum()
    return Gain(
        set_name=marked.held_out.rows.name,
        lines=float(shares[LINES]),
        phrases=float(shares[PHRASES]),
        line=marked.line,
        unknown=marked.unknown,
    )
