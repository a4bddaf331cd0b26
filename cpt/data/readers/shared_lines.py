"""Find the lines that most documents of a source share, such as menus and footers of web pages, and drop them.

A menu of short lines is found as a paragraph; a short line alone, such as `}` or `import os`, is not found."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from cpt.data.readers.columns import form_of_source
from cpt.data.readers.documents import Document
from cpt.data.readers.filters import build_components, lines_of, sieve_of, sift
from cpt.data.readers.sources import kind_of, pieces_of, read_piece
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Data, DocumentSource

FEWEST_DOCUMENTS = 20
LEAST_SHARE = 0.5
FEWEST_ITEMS = 3  # lines of a paragraph; two imports in a row are common in code
LEAST_LETTERS = 12  # in bytes: of UTF-8, so that 4 Chinese characters are enough
LEAST_OF_TEXT = 0.005  # of all characters; below, a warning would be noise
MOST_LINES = 200_000  # in memory, besides those of one document
RARE_SHARE = 0.1  # of the last documents; rarer lines are forgotten when memory is full
SAMPLE = 1_000  # documents
SAMPLE_CHARACTERS = 32 * 2**20
PIECE_BYTES = 4 * 2**20
EXCERPT = 60  # characters
TRANSFORM = "drop_lines"
LETTERS = re.compile(r"[^\W\d_]+")


class SharedLines:
    """Counts the documents that have a line. Counts are exact, or too low by `RARE_SHARE` of the documents at most."""

    def __init__(self) -> None:
        self.documents = 0
        self.characters = 0
        self.counts = Counter[str]()
        self.recent = Counter[str]()  # of the last documents
        self.num_recent = 0

    def add(self, text: str) -> None:
        self.documents += 1
        self.num_recent += 1
        self.characters += len(text)
        self.recent.update(set(units_of(text)))
        if len(self.recent) > MOST_LINES:
            self.forget_rare()

    def forget_rare(self) -> None:
        least = RARE_SHARE * self.num_recent
        for line, count in self.recent.items():
            if count >= least:
                self.counts[line] += count
        self.recent.clear()
        self.num_recent = 0

    def found(self) -> dict[str, int]:
        """Lines and paragraphs -> the documents that have them, those with most characters first."""
        self.forget_rare()
        least = max(FEWEST_DOCUMENTS, LEAST_SHARE * self.documents)
        common = {}
        for line, num in self.counts.items():
            if num > least and has_words(line):
                common[line] = num
        shared = {}
        for line, num in common.items():
            if own_part(line, common):
                shared[line] = num
        return dict(sorted(shared.items(), key=lambda item: -item[1] * len(item[0])))

    def share_of_text(self, shared: dict[str, int]) -> float:
        characters = sum(num * len(own_part(line, shared)) for line, num in shared.items())
        return characters / max(1, self.characters)

    def summary(self, shared: dict[str, int]) -> str:
        line = next(iter(shared))
        return (
            f"{len(shared):,} line(s) are in most of {self.documents:,} documents and make up"
            f" {self.share_of_text(shared):.1%} of their characters, such as `{' '.join(line[:EXCERPT].split())}`"
            f" (in {shared[line] / self.documents:.1%})"
        )


def sample_lines(data: Data, source: DocumentSource, key: str) -> SharedLines:
    """Count the lines of about `SAMPLE` documents of a source, spread over its files, as the transforms leave them."""
    shared = SharedLines()
    transforms = build_components("transform", sieve_of(data, source, key).transforms)
    pieces = pieces_of(source, key, PIECE_BYTES)
    sampled_pieces = random.Random(0).sample(pieces, min(len(pieces), SAMPLE))
    documents_of_each = -(-SAMPLE // len(sampled_pieces))
    for piece in sampled_pieces:
        for item in islice(read_piece(source, piece, key), documents_of_each):
            if isinstance(item, Document):
                for text, _ in sift(item, reported_name(source), transforms, ()):
                    shared.add(text)
        if shared.characters > SAMPLE_CHARACTERS:
            break
    return shared


def shared_line_warnings(data: Data) -> list[str]:
    """A warning for each local source of documents whose shared lines are a notable part of its text."""
    warnings = []
    for number, source in enumerate(data.sources):
        key = f"data.sources[{number}]"
        if kind_of(source.path) != "local" or not may_share_lines(source):
            continue
        lines = sample_lines(data, source, key)
        shared = lines.found()
        if lines.share_of_text(shared) >= LEAST_OF_TEXT:
            warnings.append(
                f"`{key}`: {lines.summary(shared)}. Are they menus or footers? `cpt data check` lists them, with the"
                " transform that drops them"
            )
    return warnings


def may_share_lines(source: DocumentSource) -> bool:
    """False for examples and chats, which share roles and system prompts on purpose."""
    return form_of_source(source) == "document" and source.chat is None


def units_of(text: str) -> Iterator[str]:
    """The lines, and the paragraphs of several lines, without blanks that do not matter."""
    for paragraph in text.split("\n\n"):
        lines = lines_of(paragraph)
        yield from lines
        if len(lines) >= FEWEST_ITEMS:
            yield "\n".join(lines)


def own_part(unit: str, shared: dict[str, int]) -> str:
    """A line; or of a paragraph the lines that are not shared alone."""
    if "\n" not in unit:
        return unit
    return "\n".join(line for line in unit.split("\n") if line not in shared)


def has_words(line: str) -> bool:
    return len("".join(LETTERS.findall(line)).encode()) >= LEAST_LETTERS
