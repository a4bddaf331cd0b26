"""Open a source of the recipe as documents: which local files it means, or which dataset on the Hub."""

import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128

from cpt.data.readers import READERS, Rows, first_line, text_of
from cpt.errors import DataError, ResourceError
from cpt.recipe.schema import HeldOut, Source

AnySource = Source | HeldOut
GLOB = re.compile(r"[*?\[]")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Document:
    """A text and where it stands, as an error would name it."""

    text: str
    where: str


def open_source(source: AnySource, key: str) -> Iterator[Document]:
    """The documents in the order of the files' names, at most `max_documents`.

    Args:
        key: where the source stands in the recipe, for messages: `data.sources[0]`.

    Raises:
        DataError: nothing is there, or a row is bad.
        ResourceError: the Hub cannot be reached.
    """
    rows = read_files(find_files(source, key), source.text_column, key) if is_local(source.path) else read_hub(source, key)
    for number, (where, text) in enumerate(rows, start=1):
        yield Document(text, where)
        if number == source.max_documents:
            return


def is_local(path: str) -> bool:
    """True for what can only be a local path; the rest must look like `owner/dataset`."""
    return (
        path.startswith((".", "/", "~"))
        or bool(GLOB.search(path))
        or Path(path).suffix.lower() in READERS
        or Path(path).exists()
        or not HUB_ID.fullmatch(path)
    )


def find_files(source: AnySource, key: str) -> list[Path]:
    """The files that a local source means, in sorted order.

    Raises:
        DataError: there is none, or one of an unknown kind was asked for.
    """
    path = Path(source.path).expanduser()
    known = ", ".join(READERS)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if is_document_file(file, path))
        if not files:
            raise DataError(f"{path}: the folder holds no {known} file. Set `{key}.path`.")
        return files
    files = [path] if path.is_file() else sorted(match for match in map(Path, glob.glob(str(path), recursive=True)) if match.is_file())
    if not files:
        what = "no file matches" if GLOB.search(source.path) else "no such file or folder"
        raise DataError(
            f"{source.path}: {what} (looked from {Path.cwd()}). Set `{key}.path`; a dataset on the Hub is written `owner/name`."
        )
    for file in files:
        if file.suffix.lower() not in READERS:
            raise DataError(f"{file}: cannot read a `{file.suffix}` file. Expected {known}. Set `{key}.path`.")
    return files


def is_document_file(file: Path, folder: Path) -> bool:
    """True for a file of a known kind that is not hidden."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.suffix.lower() in READERS and not hidden and file.is_file()


def read_files(files: list[Path], column: str, key: str) -> Rows:
    """The documents of all files."""
    for file in files:
        refuse_empty(file, len(files), key)
        yield from read_file(file, column, key)


def refuse_empty(file: Path, num_files: int, key: str) -> None:
    """An empty file is an error, unless it is one text among many."""
    if file.stat().st_size == 0 and (num_files == 1 or file.suffix.lower() not in (".txt", ".md")):
        raise DataError(f"{file}: the file is empty, expected documents. Fill it, or leave it out of `{key}.path`.")


def read_file(file: Path, column: str, key: str) -> Rows:
    """The documents of one file."""
    try:
        yield from READERS[file.suffix.lower()](file, column, key)
    except OSError as problem:
        raise cannot_read(file, problem, key) from problem


def read_hub(source: AnySource, key: str) -> Rows:
    """The documents of a dataset on the Hub, streamed where only the first are wanted."""
    import datasets  # takes a second, and `cpt check` must answer at once

    try:
        rows = datasets.load_dataset(
            source.path, source.subset, split=source.split, revision=source.revision, streaming=source.max_documents is not None
        )
        for number, row in enumerate(rows, start=1):
            where = f"{source.path}: row {number}"
            yield where, text_of(row, source.text_column, where, key)
    except (FileNotFoundError, ValueError, RuntimeError) as problem:
        raise DataError(
            f"{source.path}: neither a local path nor a dataset that the Hub gives us with split `{source.split}`: {first_line(problem)} "
            f"Set `{key}.path`, `.subset`, `.split` or `.revision`."
        ) from problem
    except OSError as problem:  # ConnectionError among them
        raise ResourceError(
            f"{source.path}: no such local path, and the Hub cannot be reached: {first_line(problem)}. "
            f"Go online (HF_HUB_OFFLINE is not 1), or download the dataset and set `{key}.path` to its folder."
        ) from problem


def hash_file(file: Path, key: str) -> str:
    """xxh3-128 of a file's bytes."""
    digest = xxh3_128()
    try:
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    except OSError as problem:
        raise cannot_read(file, problem, key) from problem
    return digest.hexdigest()


def cannot_read(file: Path, problem: OSError, key: str) -> DataError:
    """What to say of a file that the machine does not give us."""
    return DataError(f"{file}: cannot be read ({problem.strerror or first_line(problem)}). Set `{key}.path`.")
