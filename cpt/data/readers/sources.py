"""Read a source of the recipe: its files, the pieces they are split into, and the documents in them."""

import glob
import logging
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import chain, count, islice, zip_longest
from pathlib import Path
from typing import Any, Literal

import fsspec

from cpt.data.readers.columns import columns_of, refuse_texts
from cpt.data.readers.documents import (
    IN_HUB_CACHE,
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
    row_as_json,
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
    read_whole,
    whole_text,
)
from cpt.data.readers.hub import cannot_fetch, fetch, hub_files, is_hub_file, read_hub
from cpt.data.readers.listing import (
    Folder,
    Listing,
    count_passed_over,
    missing_shards,
    reasons_to_pass_over,
)
from cpt.data.readers.opening import (
    DAMAGE,
    KNOWN,
    compression_of,
    disguise_of,
    is_http,
    is_url,
    persistently,
    unsigned,
)
from cpt.distributed import is_main_process
from cpt.errors import CptError, DataError, RecipeError, ResourceError
from cpt.files import hash_of
from cpt.plugins import check_options, find, user_code_error
from cpt.recipe.paths import (
    DOCUMENT_FILES,
    TEXT_FILES,
    format_of,
    is_function,
    is_local,
    without_query,
)
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
# Headers or fields with the version of a file's content.
TAGS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "Last-Modified", "mtime", "created")
LISTING_THREADS = 16
NUMBER = re.compile(r"\d{5,}-of-")  # of a shard
LISTINGS: ContextVar[dict[tuple[str | None, ...], Listing] | None] = ContextVar(
    "listings", default=None
)
ONE_FORMAT = "If one of them is not text to learn, name the others: {}/*.jsonl"


def open_source(source: DocumentSource, key: str) -> Iterator[Document]:
    """The documents in order of file name, at most `max_documents`."""
    items = chain.from_iterable(read_piece(source, piece, key) for piece in pieces_of(source, key))
    yield from islice(documents_of(items, key), source.max_documents)


def pieces_of(source: DocumentSource, key: str, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """The pieces of a source, in the order of its documents. They depend only on the names and sizes of the files; no
    file is opened. A user's function, and a Hub dataset that only `datasets` can read, are one piece."""
    listing = listing_of(source, key)
    if not listing.files:
        return [Piece(source.path)]
    log_listing(source, listing)
    return cut_files(listing.files, source, piece_bytes)


def cut_files(files: Sequence[File], source: DocumentSource, piece_bytes: int) -> list[Piece]:
    pieces: list[Piece] = []
    for file in files:
        if file.size <= piece_bytes or not can_be_cut(file.name, source):
            pieces.append(Piece(file.name))
            continue
        starts = range(0, file.size, piece_bytes)
        for start, stop in zip_longest(starts, starts[1:]):
            pieces.append(Piece(file.name, start, stop))
    return pieces


def jobs_of(source: DocumentSource, key: str, piece_bytes: int) -> list[list[Piece]]:
    """The pieces that each job of a process reads; those of small files share one. A limit counts over all pieces in
    order: then there is one job."""
    pieces = pieces_of(source, key, piece_bytes)
    if source.max_documents is not None:
        return [pieces]
    sizes = {file.name: file.size for file in files_of(source, key)}
    jobs: list[list[Piece]] = []
    free_bytes = 0
    for piece in pieces:
        size = (piece.stop or sizes.get(piece.path, piece_bytes)) - piece.start
        if size > free_bytes:
            jobs.append([])
            free_bytes = piece_bytes
        jobs[-1].append(piece)
        free_bytes -= size
    return jobs


def can_be_cut(path: str, source: DocumentSource) -> bool:
    # Some HTTP servers cannot send a part of a file.
    if compression_of(path) or path.startswith(("http://", "https://")):
        return False
    if format_of(path) in TEXT_FILES:
        return source.text_documents == "line"
    return format_of(path) in (".jsonl", ".parquet")


def read_piece(source: DocumentSource, piece: Piece, key: str) -> Iterator[Document | BadRow]:
    """The documents of a piece and its bad rows, in order; the reader counts them if there are `max_documents`."""
    if piece.path == source.path:
        kind = kind_of(source.path)
        if kind == "function":
            return read_function(source, key)
        if kind == "hub":
            return read_hub(source, key, hub_files(source, key).commit)
    is_first_enough = source.streaming or source.max_documents is not None
    is_of_hub = is_url(piece.path) and not is_url(source.path)
    if is_of_hub and not is_first_enough:  # downloaded whole into the Hub's cache
        piece = Piece(fetch(piece.path, key), piece.start, piece.stop)
    return read_file_piece(source, piece, key)


def read_file_piece(source: DocumentSource, piece: Piece, key: str) -> Iterator[Document | BadRow]:
    suffix = format_of(piece.path)
    is_text = suffix in TEXT_FILES
    if is_text:
        refuse_texts(source, suffix, key)
    origin = Origin(piece.path, "document")
    content = None
    try:
        if is_text and source.text_documents == "file" and compression_of(piece.path) is None:
            content = read_whole(piece.path)  # of small files there may be millions: open each once
        disguise = disguise_of(piece.path, content) if not piece.start else None
        if disguise is not None:
            yield BadRow(*disguise, origin, 1, loses_file=True)
            return
        if content is not None:
            yield whole_text(piece.path, content)
            return
        items = READERS[suffix](piece, source)
        first = next(items, None)
        if first is not None:
            yield first
            yield from items
        elif piece.is_whole and not is_text:
            detail = f"no rows, expected documents in the column `{columns_of(source)[0]}`"
            yield BadRow("no rows", detail, origin, 1)
    except DAMAGE as problem:
        if not is_damage(problem, piece.path):
            raise cannot_read(piece.path, problem, key) from problem
        # A truncated or damaged compressed file.
        reason = "damaged file"
        detail = f"cannot be read to its end ({first_line(problem)}); the rest of it is lost"
        if "too much memory" in detail:
            reason = "long window"
            detail = "it was packed by zstd with a longer window than readers take"
        yield BadRow(reason, detail, origin, 1, loses_file=True)


def find_function(source: DocumentSource, key: str) -> Callable[..., Any]:
    function = find("source", source.path, {})
    check_options(function, source.options, f"{key}.options")
    return function


def read_function(source: DocumentSource, key: str) -> Iterator[Document | BadRow]:
    origin = Origin(source.path, "item")
    returned: Any = find_function(source, key)(**source.options)
    is_iterable = isinstance(returned, Iterable) or hasattr(returned, "__getitem__")
    if isinstance(returned, str | Mapping) or not is_iterable:
        raise RecipeError(
            f"`{key}.path`: {source.path} returned {kind_of_value(returned)}, expected a list or generator of texts"
            " or rows."
        )
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
                detail = f"{kind_of_value(row)}, expected a text or a row with the key `{source.text_column}`"
                raise BadValue("wrong type", detail)
        except BadValue as bad:
            is_text = isinstance(row, str)
            content = row.encode(errors="surrogatepass") if is_text else row_as_json(row)
            yield bad.at(origin, number, content=content)


def kind_of(path: str) -> Literal["local", "url", "function", "hub"]:
    if is_url(path):
        return "url"
    if is_function(path) and not Path(path).exists():  # unless it is the name of a file
        return "function"
    return "local" if is_local(path) or not HUB_ID.fullmatch(path) else "hub"


def files_of(source: DocumentSource, key: str) -> list[File]:
    """The files of a source, in order; empty for a function or a dataset that only `datasets` can read."""
    return listing_of(source, key).files


def listing_of(source: DocumentSource, key: str) -> Listing:
    """The files of a source, and those of its folder that are passed over, by reason."""
    listings = LISTINGS.get()
    if listings is None:
        return list_source(source, key)
    address = (source.path, source.revision, source.subset, source.split)
    if address not in listings:
        listings[address] = list_source(source, key)
    return listings[address]


@contextmanager
def listing_once() -> Iterator[None]:
    """List each source once in this block: a check asks for the same folders several times."""
    token = LISTINGS.set({})
    try:
        yield
    finally:
        LISTINGS.reset(token)


def list_source(source: DocumentSource, key: str) -> Listing:
    kind = kind_of(source.path)
    if kind == "hub":
        return Listing(hub_files(source, key).files or [])
    if kind == "function":
        return Listing()
    return list_local(source, key) if kind == "local" else list_remote(source, key)


def list_local(source: DocumentSource, key: str) -> Listing:
    path = Path(source.path).expanduser()
    try:
        if path.is_dir():
            return list_folder(path, source, key)
        matches = [str(path)] if path.is_file() else matches_of(source.path)
        statuses = {name: os.stat(name) for name in matches}
    except OSError as problem:
        raise cannot_read(problem.filename or source.path, problem, key) from problem
    files = []
    for name, status in statuses.items():
        if is_file(status):
            files.append(file_of(name, status))
    if not files:
        raise DataError(
            f"{source.path}: no such file or folder in {Path.cwd()}. Set `{key}.path`; a dataset on the Hub is"
            " written `owner/name`."
        )
    for file in files:
        refuse_unknown(file.name, key)
    folders = [("folders matched by the pattern", 0)] * (len(statuses) - len(files))
    return Listing(in_order(files), count_passed_over(folders))


def matches_of(pattern: str) -> list[str]:
    """The matches of a glob. Brackets in it are those of a name if such a file or folder exists."""
    path = Path(pattern).expanduser()
    folder = str(next(filter(Path.exists, path.parents), ""))
    in_folder = str(path.relative_to(folder))
    for part in (in_folder, in_folder.replace("[", "[[]")):
        names = glob.glob(str(Path(glob.escape(folder), part)), recursive=True)
        if names:
            return names
    return []


def list_folder(path: Path, source: DocumentSource, key: str) -> Listing:
    root = os.path.join(path, "") if path != Path() else ""
    statuses, links = walk(path, key)
    folder = Folder(
        path=source.path,
        names=sorted(statuses),
        read=lambda name: Path(root + name).read_bytes(),
        split=source.split,
        subset=source.subset,
        key=key,
    )
    is_download = (path / ".cache/huggingface").is_dir() or IN_HUB_CACHE.search(f"{path}/x")
    reasons = reasons_to_pass_over(folder, is_download=is_download is not None)
    inodes: set[tuple[int, int]] = set()
    if links:
        for name in statuses.keys() - reasons.keys() - links:
            inodes.add(inode(statuses[name]))
    for name in sorted(links - reasons.keys()):  # one of several names of a file is enough
        if inode(statuses[name]) in inodes:
            reasons[name] = "links to a file that is read"
        inodes.add(inode(statuses[name]))
    files = [file_of(root + name, statuses[name]) for name in folder.names if name not in reasons]
    if not files:
        raise DataError(
            f"{source.path}: expected a {KNOWN} file in the folder. Set `{key}.path`; a dataset on the Hub is written"
            " `owner/name`."
        )
    passed_over = [(reason, statuses[name].st_size) for name, reason in reasons.items()]
    missing = missing_shards(file.name for file in files)
    if missing:
        passed_over += [(f"missing shards ({Path(missing[0]).name})", 0)] * len(missing)
    return Listing(in_order(files), count_passed_over(passed_over), missing)


def walk(root: Path, key: str) -> tuple[dict[str, os.stat_result], set[str]]:
    """Relative name -> status of every visible file in the folder, and the names of those that are links. Links to
    folders are followed, each real folder once, but not to a folder above."""
    statuses: dict[str, os.stat_result] = {}
    links: set[str] = set()
    visited = {inode(os.stat(folder)) for folder in [root.resolve(), *root.resolve().parents]}
    folders = [(str(root), "")]  # path, and its name in the folder
    linked_folders: list[tuple[str, str]] = []
    while folders or linked_folders:
        path, below = folders.pop() if folders else linked_folders.pop(0)
        if below:
            folder_inode = inode(os.stat(path))
            if folder_inode in visited:
                continue
            visited.add(folder_inode)
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = below + entry.name
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append((entry.path, f"{name}/"))
                elif entry.is_dir():
                    linked_folders.append((entry.path, f"{name}/"))
                elif entry.is_symlink():
                    statuses[name] = status_of_link(entry.path, key)
                    links.add(name)
                elif entry.is_file():
                    statuses[name] = entry.stat()
    return statuses, links


def status_of_link(path: str, key: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as problem:
        raise DataError(
            f"{path}: a link to {os.readlink(path)}, which cannot be read ({problem.strerror}). Restore that file, or"
            f" remove the link: rm {shlex.quote(path)}. Or set `{key}.path` to a glob of the other files."
        ) from problem


def inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def is_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode)


def file_of(name: str, status: os.stat_result) -> File:
    return File(name, status.st_size, str(status.st_mtime_ns))


def in_order(files: Iterable[File]) -> list[File]:
    return sorted(files, key=lambda file: file.name.split(os.sep))


def list_remote(source: DocumentSource, key: str) -> Listing:
    """The files of a URL: one file, the matches of a glob, or the documents in a folder."""
    try:
        system, path = fsspec.core.url_to_fs(source.path)
        info_of_files, reasons = remote_files(system, path, source, key)
    except ImportError as problem:
        raise ResourceError(
            f"{source.path}: {first_line(problem)}. Install it, or set `{key}.path`."
        ) from problem
    except FileNotFoundError:
        info_of_files = {}
        reasons = {}
    except (OSError, ValueError) as problem:
        raise cannot_read(source.path, problem, key) from problem
    files = []
    for file, info in info_of_files.items():
        if file in reasons:
            continue
        name = str(system.unstrip_protocol(file))
        version = next((str(info[tag]) for tag in TAGS if info.get(tag)), "")
        refuse_unknown(name, key)
        files.append(File(name, int(info.get("size") or 0), version))
    if not files:
        raise DataError(f"{source.path}: no such file. Set `{key}.path`.")
    passed_over = []
    for file, reason in reasons.items():
        size = int(info_of_files[file].get("size") or 0)
        passed_over.append((reason, size))
    return Listing(sorted(files), count_passed_over(passed_over))


def remote_files(
    system: Any, path: str, source: DocumentSource, key: str
) -> tuple[dict[str, Mapping[str, Any]], dict[str, str]]:
    """What the file system knows about each file, and why some are passed over."""
    info_of_files: dict[str, Mapping[str, Any]] = {}
    reasons: dict[str, str] = {}
    if GLOB.search(without_query(source.path)):
        for file, info in system.glob(path, detail=True).items():
            if info["type"] == "file":
                info_of_files[file] = info
    elif format_of(source.path) in DOCUMENT_FILES:
        info_of_files[path] = info_of(system, path)
    else:
        below = path.rstrip("/") + "/"
        for file, info in system.find(path, detail=True).items():
            if "/." not in f"/{file.removeprefix(below)}":  # hidden
                info_of_files[file] = info
        folder = Folder(
            path=source.path,
            names=sorted(file.removeprefix(below) for file in info_of_files),
            read=lambda name: persistently(lambda: system.cat_file(below + name)),
            split=source.split,
            subset=source.subset,
            key=key,
        )
        for name, reason in reasons_to_pass_over(folder).items():
            reasons[below + name] = reason
    unsized = []  # an HTTP listing contains only names
    for file, info in info_of_files.items():
        if info.get("size") is None and file not in reasons:
            unsized.append(file)
    with ThreadPoolExecutor(LISTING_THREADS) as pool:
        infos = pool.map(lambda file: info_of(system, file), unsized)
        info_of_files |= zip(unsized, infos, strict=True)
    return info_of_files, reasons


def info_of(system: fsspec.AbstractFileSystem, name: str) -> Mapping[str, Any]:
    if is_http(system):
        return persistently(lambda: dict(system.info(name)))
    return dict(system.info(name))


def refuse_unknown(file: str, key: str) -> None:
    if format_of(file) in DOCUMENT_FILES:
        return
    suffix = Path(file).suffix
    conversion = ""
    if suffix.lower() in CONVERTED:
        conversion = f"Convert it first: cpt data ingest {file} --output FOLDER. "
    raise DataError(
        f"{file}: cannot read a `{suffix}` file. Expected {KNOWN}. {conversion}Set `{key}.path`."
    )


def log_listing(source: DocumentSource, listing: Listing) -> None:
    """Log what a folder holds: `corpus: 12 jsonl, 3 parquet; passed over: 2 .png files (1,024 bytes)`."""
    if not is_main_process() or not (listing.passed_over or len(listing.files) > 1):
        return
    log.info(f"{source.path}: {listing}")
    if listing.missing:
        warn_once(
            f"{listing.missing[0]}: missing, as {len(listing.missing):,} of this folder's numbered shards are. Copy or"
            f" download them. To train without them, name those that are there:"
            f" {NUMBER.sub('*-of-', listing.missing[0])}"
        )
    if listing.is_mixed:
        warn_once(f"{source.path}: files of several formats. {ONE_FORMAT.format(source.path)}")


@cache
def warn_once(message: str) -> None:
    log.warning(message)


def states_of(source: DocumentSource, key: str) -> list[File]:
    """Files with their versions, to detect changes; local files by their absolute paths."""
    return with_absolute_names(files_of(source, key))


def with_absolute_names(files: Iterable[File]) -> list[File]:
    return [file._replace(name=absolute(file.name)) for file in files]


def contents_of(files: Sequence[File]) -> dict[str, str]:
    """File -> xxh3-128 of its content, or for a URL the server's version of it."""
    contents = {}
    for name, _, version in files:
        if is_url(name):
            contents[name] = version
        else:
            contents[name] = hash_of(Path(name))
    return contents


def absolute(path: str) -> str:
    return unsigned(path) if is_url(path) else str(Path(path).expanduser().absolute())


def cannot_read(file: str, problem: Exception, key: str) -> CptError:
    if is_hub_file(file):
        return cannot_fetch(file, problem, key)
    reason = first_line(problem)
    if isinstance(problem, OSError) and problem.strerror:
        reason = problem.strerror
    return DataError(f"{file}: cannot be read ({reason}). Set `{key}.path`.")
