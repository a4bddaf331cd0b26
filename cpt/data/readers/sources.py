"""Read a source of the recipe: its files, the pieces they are split into, and the documents in them."""

import glob
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, count, islice, zip_longest
from os.path import basename
from pathlib import Path
from typing import Any, Literal

import fsspec
import pyarrow as pa

from cpt.data.readers.columns import columns_of, refuse_texts
from cpt.data.readers.documents import (
    BadRow,
    BadValue,
    Document,
    File,
    Origin,
    Piece,
    clean,
    documents_of,
    first_line,
    kind_of_value,
)
from cpt.data.readers.example import document_of
from cpt.data.readers.formats import (
    is_damage,
    read_arrow,
    read_delimited,
    read_json,
    read_json_lines,
    read_parquet,
    read_text,
)
from cpt.data.readers.hub import cannot_fetch, fetch, hub_files, is_hub_file, read_hub
from cpt.data.readers.opening import KNOWN, compression_of, format_of, is_http, is_url, persistently
from cpt.distributed import is_main_process
from cpt.errors import CptError, DataError, RecipeError, ResourceError
from cpt.plugins import check_options, find, user_code_error
from cpt.recipe.paths import DOCUMENT_FILES, TEXT_FILES, is_function, is_local
from cpt.recipe.schema import DocumentSource

READERS: dict[str, Callable[[Piece, DocumentSource], Iterator[Document | BadRow]]] = {
    ".txt": read_text,
    ".md": read_text,
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".parquet": read_parquet,
    ".csv": read_delimited,
    ".tsv": read_delimited,
    ".arrow": read_arrow,
}
PIECE_BYTES = 64 * 2**20
log = logging.getLogger("cpt")
GLOB = re.compile(r"[*?\[]")
CONVERTED = {".pdf", ".html", ".htm", ".docx", ".epub"}  # formats that `cpt data ingest` converts
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
DATASETS_OWN = {
    "dataset_info.json",
    "state.json",
    "dataset_dict.json",
}  # saved by `datasets` next to its arrow files
# Headers or fields with the version of a file's content.
TAGS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "Last-Modified", "mtime", "created")
LISTING_THREADS = 16


def open_source(source: DocumentSource, key: str) -> Iterator[Document]:
    """The documents in order of file name, at most `max_documents`."""
    items = chain.from_iterable(read_piece(source, piece, key) for piece in pieces_of(source, key))
    yield from islice(documents_of(items, key), source.max_documents)


def pieces_of(source: DocumentSource, key: str, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """The pieces of a source, in the order of its documents. They depend only on the names and sizes of the files; no
    file is opened. A user's function, and a Hub dataset that only `datasets` can read, are one piece."""
    files = files_of(source, key)
    if not files:
        return [Piece(source.path)]
    log_formats(source)
    pieces: list[Piece] = []
    for file in files:
        is_cut = file.size > piece_bytes and can_be_cut(file.name, source)
        starts = range(0, file.size, piece_bytes) if is_cut else range(1)
        pieces += [Piece(file.name, start, stop) for start, stop in zip_longest(starts, starts[1:])]
    return pieces


def jobs_of(source: DocumentSource, key: str, piece_bytes: int) -> list[list[Piece]]:
    """The pieces that each job of a process reads. A limit counts over all pieces in order: then there is one job."""
    pieces = pieces_of(source, key, piece_bytes)
    return [[piece] for piece in pieces] if source.max_documents is None else [pieces]


def can_be_cut(path: str, source: DocumentSource) -> bool:
    # Some HTTP servers cannot send a part of a file.
    if compression_of(path) or path.startswith(("http://", "https://")):
        return False
    if format_of(path) in TEXT_FILES:
        return source.text_documents == "line"
    return format_of(path) in (".jsonl", ".parquet")


def read_piece(source: DocumentSource, piece: Piece, key: str) -> Iterator[Document | BadRow]:
    """The documents of a piece and its bad rows, in order; the reader counts them if there are `max_documents`."""
    kind, is_first_enough = (
        kind_of(source.path),
        source.streaming or source.max_documents is not None,
    )
    if kind == "function":
        return read_function(source, key)
    if kind == "hub" and piece.path == source.path:
        return read_hub(source, key, hub_files(source, key).commit)
    if kind == "hub" and not is_first_enough:  # downloaded whole into the Hub's cache
        piece = replace(piece, path=fetch(piece.path, key))
    return read_file_piece(source, piece, key)


def read_file_piece(source: DocumentSource, piece: Piece, key: str) -> Iterator[Document | BadRow]:
    if format_of(piece.path) in TEXT_FILES:
        refuse_texts(source, format_of(piece.path), key)
    whole = Origin(piece.path, "document")
    try:
        items = READERS[format_of(piece.path)](piece, source)
        if (first := next(items, None)) is not None:
            yield first
            yield from items
        elif piece.is_whole and format_of(piece.path) not in TEXT_FILES:
            yield BadRow(
                "no rows",
                f"no rows, expected documents in the column `{columns_of(source)[0]}`",
                whole,
                1,
            )
    except (OSError, pa.ArrowException) as problem:
        if not is_damage(problem, piece.path):
            raise cannot_read(piece.path, problem, key) from problem
        # A truncated or damaged compressed file.
        lost = f"cannot be read to its end ({first_line(problem)}); the rest of it is lost"
        yield BadRow("damaged file", lost, whole, 1)


def find_function(source: DocumentSource, key: str) -> Callable[..., Any]:
    function = find("source", source.path, {})
    check_options(function, source.options, f"{key}.options")
    return function


def read_function(source: DocumentSource, key: str) -> Iterator[Document | BadRow]:
    origin = Origin(source.path, "item")
    returned: Any = find_function(source, key)(**source.options)
    if isinstance(returned, str | Mapping) or not (
        isinstance(returned, Iterable) or hasattr(returned, "__getitem__")
    ):
        given = f"{source.path} returned {kind_of_value(returned)}"
        raise RecipeError(f"`{key}.path`: {given}, expected a list or generator of texts or rows.")
    rows = iter(returned)
    for number in count(1):
        try:
            row = next(rows)
        except StopIteration:
            return
        except CptError:
            raise
        except Exception as problem:
            raise user_code_error(
                f"{origin.where(number)}: the source `{source.path}`", problem
            ) from problem
        try:
            if isinstance(row, str):
                yield Document(clean(row, "text"), origin, number)
            elif isinstance(row, Mapping):
                yield document_of(row, source, origin, number)
            else:
                what = f"{kind_of_value(row)}, expected a text or a row with the key `{source.text_column}`"
                raise BadValue("wrong type", what)
        except BadValue as bad:
            yield bad.at(origin, number)


def kind_of(path: str) -> Literal["local", "url", "function", "hub"]:
    if is_url(path):
        return "url"
    if is_function(path) and not Path(path).exists():  # unless it is the name of a file
        return "function"
    return "local" if is_local(path) or not HUB_ID.fullmatch(path) else "hub"


def files_of(source: DocumentSource, key: str) -> list[File]:
    """The files of a source, in order; empty for a function or a dataset that only `datasets` can read."""
    kind = kind_of(source.path)
    if kind == "hub":
        return hub_files(source, key).files or []
    if kind == "function":
        return []
    return find_local(source, key) if kind == "local" else find_remote(source, key)


def find_local(source: DocumentSource, key: str) -> list[File]:
    path = Path(source.path).expanduser()
    if (path / "dataset_dict.json").is_file():  # saved by `datasets`, one folder per split
        path = path / source.split
    try:
        if path.is_dir():
            folder = os.path.join(path, "") if path != Path() else ""
            found = [(folder + name, status) for name, status in walk(path) if is_document(name)]
        else:
            names = [str(path)] if path.is_file() else glob.glob(str(path), recursive=True)
            found = [
                (name, status) for name in names if stat.S_ISREG((status := os.stat(name)).st_mode)
            ]
            for name, _ in found:
                refuse_unknown(name, key)
    except OSError as problem:
        raise cannot_read(problem.filename or source.path, problem, key) from problem
    if not found:
        what = (
            f"expected a {KNOWN} file in the folder"
            if path.is_dir()
            else f"no such file or folder in {Path.cwd()}"
        )
        raise DataError(
            f"{source.path}: {what}. Set `{key}.path`; a dataset on the Hub is written `owner/name`."
        )
    files = [File(name, status.st_size, str(status.st_mtime_ns)) for name, status in found]
    return sorted(files, key=lambda file: file.name.split(os.sep))


def walk(folder: Path, below: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yield relative path and status of every visible file in the folder; links to folders are not followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from walk(Path(entry.path), f"{below}{entry.name}/")
            elif entry.is_file():
                yield below + entry.name, entry.stat()


def is_document(path: str) -> bool:
    return format_of(path) in DOCUMENT_FILES and basename(path) not in DATASETS_OWN


def find_remote(source: DocumentSource, key: str) -> list[File]:
    """The files of a URL: one file, the matches of a glob, or all supported files below a folder."""
    try:
        system, name = fsspec.core.url_to_fs(source.path)
        if GLOB.search(source.path):
            found = {
                file: info
                for file, info in system.glob(name, detail=True).items()
                if info["type"] == "file"
            }
        elif format_of(name) in DOCUMENT_FILES:
            found = {name: info_of(system, name)}
        else:
            below = system.find(name, detail=True).items()
            found = {file: info for file, info in below if format_of(file) in DOCUMENT_FILES}
        # An HTTP listing contains only names.
        unsized = [file for file, info in found.items() if info.get("size") is None]
        with ThreadPoolExecutor(LISTING_THREADS) as pool:
            found |= zip(
                unsized, pool.map(lambda file: info_of(system, file), unsized), strict=True
            )
    except ImportError as problem:
        raise ResourceError(
            f"{source.path}: {first_line(problem)}. Install it, or set `{key}.path`."
        ) from problem
    except FileNotFoundError:
        found = {}
    except (OSError, ValueError) as problem:
        raise cannot_read(source.path, problem, key) from problem
    if not found:
        raise DataError(f"{source.path}: no such file. Set `{key}.path`.")
    files = []
    for file, info in found.items():
        name, version = (
            str(system.unstrip_protocol(file)),
            next((str(info[tag]) for tag in TAGS if info.get(tag)), ""),
        )
        refuse_unknown(name, key)
        files.append(File(name, int(info.get("size") or 0), version))
    return sorted(files)


def info_of(system: fsspec.AbstractFileSystem, name: str) -> Mapping[str, Any]:
    return (
        persistently(lambda: dict(system.info(name)))
        if is_http(system)
        else dict(system.info(name))
    )


def refuse_unknown(file: str, key: str) -> None:
    if format_of(file) not in DOCUMENT_FILES:
        suffix = Path(file).suffix
        convert = (
            f"Convert it first: cpt data ingest {file} --output FOLDER. "
            if suffix.lower() in CONVERTED
            else ""
        )
        raise DataError(
            f"{file}: cannot read a `{suffix}` file. Expected {KNOWN}. {convert}Set `{key}.path`."
        )


def log_formats(source: DocumentSource) -> None:
    """Log the file counts of a folder: `corpus: 12 jsonl, 3 parquet, 2 skipped: .png`."""
    folder = Path(source.path).expanduser()
    if kind_of(source.path) != "local" or not is_main_process() or not folder.is_dir():
        return
    names = sorted(name for name, _ in walk(folder))
    read = Counter(format_of(name).removeprefix(".") for name in names if is_document(name))
    skipped = Counter(
        Path(name).suffix or basename(name) for name in names if not is_document(name)
    )
    parts = [f"{count:,} {name}" for name, count in read.most_common()]
    if links := sorted(
        path.name for path in folder.iterdir() if path.is_symlink() and not path.is_file()
    ):
        parts.append(f"not followed: the link(s) {', '.join(links)}")
    if skipped:
        parts.append(f"{skipped.total():,} skipped: {', '.join(sorted(skipped))}")
    log.info(f"{source.path}: {', '.join(parts)}")


def states_of(source: DocumentSource, key: str) -> list[File]:
    """Files with their versions, to detect changes; local files by their absolute paths."""
    return [file._replace(name=absolute(file.name)) for file in files_of(source, key)]


def absolute(path: str) -> str:
    return path if is_url(path) else str(Path(path).expanduser().absolute())


def cannot_read(file: str, problem: Exception, key: str) -> CptError:
    if is_hub_file(file):
        return cannot_fetch(file, problem, key)
    reason = (
        problem.strerror
        if isinstance(problem, OSError) and problem.strerror
        else first_line(problem)
    )
    return DataError(f"{file}: cannot be read ({reason}). Set `{key}.path`.")
