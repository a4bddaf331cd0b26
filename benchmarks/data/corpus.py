"""Text that is found on any machine with Python: sources and documentation, one file a document, in one jsonl file."""

import sys
from collections.abc import Iterator
from pathlib import Path

import orjson

ROOTS = (Path(sys.prefix) / "lib", Path(sys.base_prefix) / "lib", Path("/usr/share"), Path("/usr/lib/python3"))
SUFFIXES = {".py", ".pyi", ".txt", ".md", ".rst", ".h", ".hpp", ".c", ".html", ".js"}
MEGABYTE = 10**6


def found_texts() -> Iterator[str]:
    """The content of text files below ROOTS, in the order of their names."""
    for root in ROOTS:
        for path in sorted(root.rglob("*")):
            if path.suffix not in SUFFIXES or not path.is_file():
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if text.strip() and "\0" not in text and len(text) <= MEGABYTE:
                yield text


def write_corpus(path: Path, megabytes: int) -> dict[str, float]:
    """Write at least so much text, again with another first line where the machine has less, and say what it is."""
    size = documents = rounds = 0
    with path.open("wb") as file:
        while size < megabytes * MEGABYTE:
            for text in found_texts():
                copy = text if rounds == 0 else f"copy {rounds}\n{text}"
                file.write(orjson.dumps({"text": copy}) + b"\n")
                size += len(copy.encode())
                documents += 1
                if size >= megabytes * MEGABYTE:
                    break
            rounds += 1
    return {"text_megabytes": size / MEGABYTE, "documents": documents, "rounds_over_the_files": rounds}


def texts_of(path: Path) -> list[str]:
    """The documents of a jsonl file."""
    with path.open("rb") as file:
        return [orjson.loads(line)["text"] for line in file]
