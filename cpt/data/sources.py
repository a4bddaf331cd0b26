"""Open a source of the recipe as documents: which files it means, in which pieces they can be read, and what stands in them."""

import glob
import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import fsspec
import pyarrow as pa
from xxhash import xxh3_128

from cpt.data.bad_rows import complaint
from cpt.data.documents import BadRow as BadRow
from cpt.data.documents import Document as Document
from cpt.data.documents import Origin
from cpt.data.documents import Piece as Piece
from cpt.data.readers.formats import KNOWN, READERS, TEXTS, ranges_of
from cpt.data.readers.function import is_function, read_function
from cpt.data.readers.hub import read_hub
from cpt.data.readers.opening import format_of, is_url, size_of
from cpt.data.readers.values import first_line
from cpt.errors import DataError, ResourceError
from cpt.ranks import is_main_process
from cpt.recipe.schema import DocumentSource

log = logging.getLogger("cpt")
GLOB = re.compile(r"[*?\[]")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
DATASETS_OWN = {"dataset_info.json", "state.json", "dataset_dict.json"}  # what `datasets` saves beside its arrow files
PIECE_BYTES = 64 * 2**20


def open_source(source: DocumentSource, key: str) -> Iterator[Document]:
    """The documents in the order of the files' names, at most `max_documents`.

    Args:
        key: where the source stands in the recipe, for messages: `data.sources[0]`.

    Raises:
        DataError: nothing is there, or a row is bad.
        ResourceError: the Hub or another server cannot be reached.
    """
    number = 0
    for piece in pieces_of(source, key):
        for item in read_piece(source, piece, key):
            if isinstance(item, BadRow):
                raise DataError(complaint(item, key))
            yield item
            number += 1
            if number == source.max_documents:
                return


def pieces_of(source: DocumentSource, key: str, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """The source in pieces that can be read apart from each other; their documents, one after the other, are the source's.

    A dataset on the Hub and a user's function are one piece, for the main process.

    Raises:
        DataError: nothing is there, or a file of an unknown kind.
        ResourceError: a server cannot be reached.
    """
    if kind_of(source.path) in ("hub", "function"):
        return [Piece(source.path, 0, None, 0)]
    files = files_of(source, key)
    tell_formats(source)
    try:
        ranges = [(file, part) for file in files for part in ranges_of(file, size_of(file), source, piece_bytes)]
    except OSError as problem:
        raise cannot_read(source.path, problem, key) from problem
    return [Piece(file, part.start, part.stop, number) for number, (file, part) in enumerate(ranges)]


def read_piece(source: DocumentSource, piece: Piece, key: str) -> Iterator[Document | BadRow]:
    """The documents of a piece and its bad rows, in order.

    What a row is read into is decided here; what becomes of bad ones by `bad_rows.apply_policy`. `max_documents` counts over all pieces, so
    it is up to the caller; a piece gives no more than it.

    Raises:
        DataError: the file cannot be read at all, or the dataset is not there.
        RecipeError: the user's function does not exist or refuses its options.
        ResourceError: the Hub or another server cannot be reached.
    """
    if kind_of(source.path) == "hub":
        items = read_hub(source, key)
    elif kind_of(source.path) == "function":
        items = read_function(source, key)
    else:
        items = read_file_piece(source, piece, key)
    if source.max_documents is None:
        yield from items
        return
    documents = 0
    for item in items:
        yield item
        documents += isinstance(item, Document)
        if documents == source.max_documents:
            return


def read_file_piece(source: DocumentSource, piece: Piece, key: str) -> Iterator[Document | BadRow]:
    """The documents of a piece of a file."""
    whole = Origin(piece.path, "document")
    try:
        is_one_of_many = format_of(piece.path) in TEXTS and Path(piece.path) != Path(source.path).expanduser()
        if size_of(piece.path) == 0 and not is_one_of_many:
            yield BadRow("empty file", "the file is empty, expected documents", whole, 1)
            return
        yield from READERS[format_of(piece.path)](piece, source)
    except (OSError, pa.ArrowException) as problem:
        if isinstance(problem, OSError) and (problem.errno or is_url(piece.path) and not isinstance(problem, pa.ArrowException)):
            raise cannot_read(piece.path, problem, key) from problem
        # A compressed file that is cut off or damaged.
        yield BadRow("damaged file", f"cannot be read to its end ({first_line(problem)}); the rest of it is lost", whole, 1)


def kind_of(path: str) -> Literal["local", "url", "function", "hub"]:
    """What a source's path means."""
    if is_url(path):
        return "url"
    if is_function(path):
        return "function"
    return "local" if is_local(path) else "hub"


def is_local(path: str) -> bool:
    """True for what can only be a local path; the rest must look like `owner/dataset`."""
    if is_url(path) or is_function(path):
        return False
    return (
        path.startswith((".", "/", "~"))
        or bool(GLOB.search(path))
        or format_of(path) in READERS
        or Path(path).exists()
        or not HUB_ID.fullmatch(path)
    )


def files_of(source: DocumentSource, key: str) -> list[str]:
    """The files that a source means, local or behind a URL, in sorted order."""
    if is_url(source.path):
        return find_remote_files(source, key)
    return [str(file) for file in find_files(source, key)]


def find_files(source: DocumentSource, key: str) -> list[Path]:
    """The files that a local source means, in sorted order.

    Raises:
        DataError: there is none, or one of an unknown kind was asked for.
    """
    path = Path(source.path).expanduser()
    if (path / "dataset_dict.json").is_file():  # saved by `datasets`, one folder a split
        path = path / source.split
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if is_document_file(file, path))
        if not files:
            raise DataError(f"{path}: the folder holds no {KNOWN} file. Set `{key}.path`.")
        return files
    files = [path] if path.is_file() else sorted(match for match in map(Path, glob.glob(str(path), recursive=True)) if match.is_file())
    if not files:
        what = "no file matches" if GLOB.search(source.path) else "no such file or folder"
        raise DataError(
            f"{source.path}: {what} (looked from {Path.cwd()}). Set `{key}.path`; a dataset on the Hub is written `owner/name`."
        )
    for file in files:
        refuse_unknown(str(file), key)
    return files


def find_remote_files(source: DocumentSource, key: str) -> list[str]:
    """The files that a URL means: one, those that match, or all of a known kind below it."""
    try:
        system, name = fsspec.core.url_to_fs(source.path)
        if GLOB.search(source.path):
            found = [str(file) for file in system.glob(name)]
        else:
            found = [name] if format_of(name) in READERS else [file for file in system.find(name) if format_of(file) in READERS]
        if not found or found == [name] and not system.exists(name):
            raise DataError(f"{source.path}: no such file. Set `{key}.path`.")
    except ImportError as problem:
        raise ResourceError(f"{source.path}: {first_line(problem)}. Install it, or set `{key}.path` to what is here.") from problem
    except (OSError, ValueError) as problem:
        raise cannot_read(source.path, problem, key) from problem
    files = sorted(str(system.unstrip_protocol(file)) for file in found)
    for file in files:
        refuse_unknown(file, key)
    return files


def refuse_unknown(file: str, key: str) -> None:
    """A file that was asked for must be of a known kind."""
    if format_of(file) not in READERS:
        raise DataError(f"{file}: cannot read a `{Path(file).suffix}` file. Expected {KNOWN}. Set `{key}.path`.")


def is_document_file(file: Path, folder: Path) -> bool:
    """True for a file of a known kind that is not hidden."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return format_of(file.name) in READERS and file.name not in DATASETS_OWN and not hidden and file.is_file()


def tell_formats(source: DocumentSource) -> None:
    """Log what was found in a folder, and what is passed over: `corpus: 12 jsonl, 3 parquet, 2 skipped: .png`."""
    folder = Path(source.path).expanduser()
    if is_url(source.path) or not folder.is_dir() or not is_main_process():
        return
    files = [file for file in folder.rglob("*") if file.is_file()]
    read = Counter(format_of(file.name).removeprefix(".") for file in files if is_document_file(file, folder))
    skipped = [file for file in files if not is_document_file(file, folder)]
    parts = [f"{count:,} {name}" for name, count in read.most_common()]
    if skipped:
        parts.append(f"{len(skipped):,} skipped: {', '.join(sorted({file.suffix or file.name for file in skipped}))}")
    log.info(f"{source.path}: {', '.join(parts)}")


def states_of(source: DocumentSource, key: str) -> list[tuple[str, int, str]]:
    """Name, size and version (time of change, or the server's tag) of each file: equal states, equal content; none of Hub and functions."""
    if kind_of(source.path) in ("hub", "function"):
        return []
    try:
        return [state_of(file) for file in files_of(source, key)]
    except OSError as problem:
        raise cannot_read(source.path, problem, key) from problem


def state_of(file: str) -> tuple[str, int, str]:
    """Name, size and version of one file."""
    if not is_url(file):
        found = Path(file).stat()
        return str(Path(file).absolute()), found.st_size, str(found.st_mtime_ns)
    system, name = fsspec.core.url_to_fs(file)
    info = system.info(name)
    tags = [str(info[tag]) for tag in ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created") if info.get(tag)]
    return file, int(info.get("size") or 0), tags[0] if tags else ""


def hash_file(file: Path | str, key: str) -> str:
    """xxh3-128 of a file's bytes."""
    digest = xxh3_128()
    try:
        with fsspec.open(file, "rb") if is_url(str(file)) else Path(file).open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    except OSError as problem:
        raise cannot_read(str(file), problem, key) from problem
    return digest.hexdigest()


def cannot_read(file: str, problem: Exception, key: str) -> DataError:
    """What to say of a file that the machine, or a server, does not give us."""
    reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else first_line(problem)
    return DataError(f"{file}: cannot be read ({reason}). Set `{key}.path`.")
