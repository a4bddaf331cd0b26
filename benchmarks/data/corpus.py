"""Text that is found on any machine with Python: sources and documentation, one file a document, in one jsonl file."""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import orjson

ROOTS = (
    Path(sys.prefix) / "lib",
    Path(sys.base_prefix) / "lib",
    Path("/usr/share"),
    Path("/usr/lib/python3"),
)
SUFFIXES = {".py", ".pyi", ".txt", ".md", ".rst", ".h", ".hpp", ".c", ".html", ".js"}
MEGABYTE = 10**6
Facts = dict[str, float]


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


def write_corpora(folder: Path, sizes: list[int]) -> dict[int, Facts]:
    """Write {size}.jsonl for each size in MB of text; a smaller one is how the larger ones begin.

    Where the machine has less text, it comes again with another first line.
    """
    wanted, facts = sorted(set(sizes)), {}
    files = {size: path_of(folder, size).open("wb") for size in wanted}
    written = documents = rounds = 0
    while wanted:
        for text in found_texts():
            copy = text if rounds == 0 else f"copy {rounds}\n{text}"
            line = orjson.dumps({"text": copy}) + b"\n"
            written, documents = written + len(copy.encode()), documents + 1
            for size in wanted:
                files[size].write(line)
            while wanted and written >= wanted[0] * MEGABYTE:
                size = wanted.pop(0)
                files[size].close()
                facts[size] = {
                    "text_megabytes": written / MEGABYTE,
                    "documents": documents,
                    "rounds_over_the_files": rounds + 1,
                }
            if not wanted:
                break
        rounds += 1
    return facts


def path_of(folder: Path, size: int) -> Path:
    return folder / f"{size}.jsonl"


def write_parts(corpus: Path, folder: Path, number: int) -> None:
    """The same documents in files of about one size, for those who share out files among processes."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [(folder / f"{part}.jsonl").open("wb") for part in range(number)]
    sizes = [0] * number
    with corpus.open("rb") as lines:
        for line in lines:
            smallest = sizes.index(min(sizes))
            sizes[smallest] += files[smallest].write(line)
    for file in files:
        file.close()


def texts_of(path: Path, limit: int | None = None) -> list[str]:
    """The documents of a jsonl file, or the first so many."""
    with path.open("rb") as file:
        return [orjson.loads(line)["text"] for line in islice(file, limit)]


def write_texts(path: Path, texts: Iterator[str]) -> None:
    with path.open("wb") as file:
        file.writelines(orjson.dumps({"text": text}) + b"\n" for text in texts)
