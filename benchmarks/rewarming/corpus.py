"""Text of three kinds, each in training and held-out files: what the base knows, and two domains at different
distances from it."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.library_corpus import join_passages
from cpt.data.readers.standard_library import first_occurrences, is_held_out, read_library
from cpt.errors import DataError

GENERAL = "general"
HELD_OUT_REFERENCE_PERCENT = (
    20  # of its few long texts more than the tenth that is held out of the others
)
TOKENIZER_BYTES = 50_000_000  # of each kind: more would change little


@dataclass(frozen=True)
class Text:
    """The files of one kind of text."""

    train: Path
    held_out: Path


@dataclass(frozen=True)
class Shift:
    """A domain, and the share of the tokens that replays general text on the way there.

    Attributes:
        replay: the paper's: 0.05 for a weak shift, 0.25 for a strong one.
    """

    name: str
    what: str
    replay: float


SHIFTS = (
    Shift("strong", "Python code", 0.25),
    Shift("weak", "the Python language reference", 0.05),
)


def write_library(library: Path, folder: Path) -> dict[str, Text]:
    """The standard library as docstrings (general), the language reference (weak shift) and code without docstrings
    (strong shift).

    As in the demo's corpus a file is held out or trained on as a whole, and a passage that occurs twice is kept once.

    Raises:
        DataError: this Python has no language reference.
    """
    documents: dict[tuple[str, bool], list[str]] = {
        (kind, part): [] for kind in (GENERAL, "weak", "strong") for part in (False, True)
    }
    seen: set[str] = set()
    for name, kind, passages in read_library(library):
        own = "strong" if kind == "domain" else "weak" if name.startswith("topic ") else GENERAL
        held_out = bucket(name) < HELD_OUT_REFERENCE_PERCENT if own == "weak" else is_held_out(name)
        documents[own, held_out] += join_passages(first_occurrences(passages, seen))
    if not documents["weak", True]:
        raise DataError(
            f"{library} has no pydoc_data/topics.py with the language reference. Use a Python that has it."
        )
    return {
        kind: write_text(kind, documents[kind, False], documents[kind, True], folder)
        for kind in (GENERAL, "weak", "strong")
    }


def write_text(kind: str, train: Iterable[str], held_out: Iterable[str], folder: Path) -> Text:
    """Two files, ordered by hash, so that the first documents are a fair sample."""
    text = Text(folder / kind / "train.jsonl", folder / kind / "held_out.jsonl")
    for path, documents in ((text.train, train), (text.held_out, held_out)):
        path.parent.mkdir(parents=True, exist_ok=True)
        ordered = sorted(documents, key=lambda document: hashlib.sha256(document.encode()).digest())
        path.write_text(
            "".join(json.dumps({"text": document}) + "\n" for document in ordered), encoding="utf-8"
        )
    return text


def read_texts(path: Path) -> Iterator[str]:
    """The documents of a jsonl file."""
    with path.open(encoding="utf-8") as lines:
        yield from (json.loads(line)["text"] for line in lines)


def tokenizer_texts(texts: Mapping[str, Text]) -> Iterator[str]:
    """What the tokenizer learns from: training text of every kind, so that no arm has an advantage by it."""
    for text in texts.values():
        left = TOKENIZER_BYTES
        for document in read_texts(text.train):
            left -= len(document.encode())
            if left < 0:
                break
            yield document


def bucket(name: str) -> int:
    """0 to 99, the same on every machine; another division than the order of the documents."""
    return int(hashlib.sha256(f"held out? {name}".encode()).hexdigest(), 16) % 100
