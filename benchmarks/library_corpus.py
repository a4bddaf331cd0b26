"""The demo's corpus as four jsonl files, for benchmarks that need more of it than the demo writes."""

import hashlib
import json
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cpt.data.readers.standard_library import (
    MAX_CHARACTERS,
    MIN_CHARACTERS,
    Kind,
    Part,
    first_occurrences,
    is_held_out,
    read_library,
)


@dataclass(frozen=True)
class Corpus:
    """Where the four jsonl files lie, and how many documents and UTF-8 bytes each holds."""

    files: dict[tuple[Kind, Part], Path]
    documents: dict[tuple[Kind, Part], int]
    num_bytes: dict[tuple[Kind, Part], int]


def build_corpus(
    folder: Path, library: Path | None = None, *, has_reference: bool = True
) -> Corpus:
    """Write `<domain|general>/<train|held_out>.jsonl` under `folder`; a file of the library is on one side as a whole,
    its docstrings too.

    Args:
        library: the folder to read; by default this Python's standard library.
        has_reference: whether the general text has the language reference, too.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    documents: dict[tuple[Kind, Part], list[str]] = {
        (k, p): [] for k in ("domain", "general") for p in ("train", "held_out")
    }
    seen: set[str] = set()
    for name, kind, passages in read_library(library):
        part: Part = "held_out" if is_held_out(name) else "train"
        new_passages = join_passages(first_occurrences(passages, seen))
        if has_reference or not name.startswith("topic "):
            documents[kind, part] += new_passages
    files = {}
    for (kind, part), texts in documents.items():
        path = files[kind, part] = folder / kind / f"{part}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Ordered by hash, so that the first n documents are a fair sample (`max_documents`) and no order is learned.
        ordered = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
        path.write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in ordered), encoding="utf-8"
        )
    return Corpus(
        files=files,
        documents={key: len(texts) for key, texts in documents.items()},
        num_bytes={
            key: sum(len(text.encode()) for text in texts) for key, texts in documents.items()
        },
    )


def join_passages(passages: Iterable[str]) -> list[str]:
    """Documents of neighbouring passages, about MAX_CHARACTERS long; what stays under MIN_CHARACTERS is dropped."""
    documents: list[list[str]] = [[]]
    for passage in passages:
        documents[-1].append(passage)
        if sum(map(len, documents[-1])) > MAX_CHARACTERS:
            documents.append([])
    texts = ("\n\n".join(document) for document in documents)
    return [text for text in texts if len(text) >= MIN_CHARACTERS]
