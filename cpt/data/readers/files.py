"""Which files a source means, with their sizes and versions: from one listing, none of them is opened."""

import glob
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import fsspec
from xxhash import xxh3_128

from cpt.data.readers.documents import File
from cpt.data.readers.hub import cannot_fetch, hub_files, is_hub_file
from cpt.data.readers.opening import KNOWN, format_of, is_http, is_url, open_plain, persistently
from cpt.data.readers.values import first_line
from cpt.errors import CptError, DataError, ResourceError
from cpt.ranks import is_main_process
from cpt.recipe.paths import DOCUMENT_FILES, is_function, is_local
from cpt.recipe.schema import DocumentSource

log = logging.getLogger("cpt")
GLOB = re.compile(r"[*?\[]")
CONVERTED = {".pdf", ".html", ".htm", ".docx", ".epub"}  # by `cpt data ingest`
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
DATASETS_OWN = {"dataset_info.json", "state.json", "dataset_dict.json"}  # what `datasets` saves beside its arrow files
TAGS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "Last-Modified", "mtime", "created")
ASKED_AT_ONCE = 16


def kind_of(path: str) -> Literal["local", "url", "function", "hub"]:
    if is_url(path):
        return "url"
    if is_function(path) and not Path(path).exists():  # a file may be called so
        return "function"
    return "local" if is_local(path) or not HUB_ID.fullmatch(path) else "hub"


def files_of(source: DocumentSource, key: str) -> list[File]:
    """The files that a source means, local, behind a URL or on the Hub, in order; none of a function or of what only
    `datasets` can read."""
    kind = kind_of(source.path)
    if kind == "hub":
        return hub_files(source, key).files or []
    return find_local(source, key) if kind == "local" else find_remote(source, key) if kind == "url" else []


def find_local(source: DocumentSource, key: str) -> list[File]:
    path = Path(source.path).expanduser()
    if (path / "dataset_dict.json").is_file():  # saved by `datasets`, one folder a split
        path = path / source.split
    try:
        if path.is_dir():
            folder = os.path.join(path, "") if path != Path() else ""
            files = [as_file(folder + name, found) for name, found in walk(path) if is_document(name)]
        else:
            names = [str(path)] if path.is_file() else glob.glob(str(path), recursive=True)
            files = [as_file(name, found) for name in names if stat.S_ISREG((found := os.stat(name)).st_mode)]
            for file in files:
                refuse_unknown(file.name, key)
    except OSError as problem:
        raise cannot_read(problem.filename or source.path, problem, key) from problem
    if not files and path.is_dir():
        raise DataError(f"{path}: the folder holds no {KNOWN} file. Set `{key}.path`.")
    if not files:
        what = "no file matches" if GLOB.search(source.path) else "no such file or folder"
        where = f"(looked from {Path.cwd()}). Set `{key}.path`; a dataset on the Hub is written `owner/name`."
        raise DataError(f"{source.path}: {what} {where}")
    return sorted(files, key=lambda file: file.name.split(os.sep))


def walk(folder: Path, below: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Every file of a folder and the folders in it, by its name from there; links to folders are not followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from walk(Path(entry.path), f"{below}{entry.name}/")
            elif entry.is_file():
                yield below + entry.name, entry.stat()


def as_file(name: str, found: os.stat_result) -> File:
    return File(name, found.st_size, str(found.st_mtime_ns))


def is_document(name: str) -> bool:
    """True for a file of a known kind that is not hidden, by its name from the source's folder."""
    *folders, last = name.split("/")
    return (
        format_of(last) in DOCUMENT_FILES
        and last not in DATASETS_OWN
        and not any(part.startswith(".") for part in (*folders, last))
    )


def find_remote(source: DocumentSource, key: str) -> list[File]:
    """The files that a URL means: one, those that match, or all of a known kind below it."""
    try:
        system, name = fsspec.core.url_to_fs(source.path)
        if GLOB.search(source.path):
            found = {file: info for file, info in system.glob(name, detail=True).items() if info["type"] == "file"}
        elif format_of(name) in DOCUMENT_FILES:
            found = {name: info_of(system, name)}
        else:
            found = {
                file: info
                for file, info in system.find(name, detail=True).items()
                if format_of(file) in DOCUMENT_FILES
            }
        # The listing of an HTTP server has nothing but names.
        unsized = [file for file, info in found.items() if info.get("size") is None]
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            found |= zip(unsized, pool.map(lambda file: info_of(system, file), unsized), strict=True)
    except ImportError as problem:
        raise ResourceError(
            f"{source.path}: {first_line(problem)}. Install it, or set `{key}.path` to what is here."
        ) from problem
    except FileNotFoundError:
        found = {}
    except (OSError, ValueError) as problem:
        raise cannot_read(source.path, problem, key) from problem
    if not found:
        raise DataError(f"{source.path}: no such file. Set `{key}.path`.")
    files = [
        File(str(system.unstrip_protocol(file)), int(info.get("size") or 0), version_of(info))
        for file, info in found.items()
    ]
    for file in files:
        refuse_unknown(file.name, key)
    return sorted(files)


def info_of(system: fsspec.AbstractFileSystem, name: str) -> Mapping[str, Any]:
    return persistently(lambda: dict(system.info(name))) if is_http(system) else dict(system.info(name))


def version_of(info: Mapping[str, Any]) -> str:
    """The first thing a server says of a file that changes with it, empty where it says nothing."""
    return next((str(info[tag]) for tag in TAGS if info.get(tag)), "")


def refuse_unknown(file: str, key: str) -> None:
    """A file that was asked for must be of a known kind."""
    if format_of(file) not in DOCUMENT_FILES:
        suffix = Path(file).suffix
        convert = f"Convert it first: cpt data ingest {file} --output FOLDER. " if suffix.lower() in CONVERTED else ""
        raise DataError(f"{file}: cannot read a `{suffix}` file. Expected {KNOWN}. {convert}Set `{key}.path`.")


def tell_formats(source: DocumentSource) -> None:
    """Log what is in a folder, and what is skipped: `corpus: 12 jsonl, 3 parquet, 2 skipped: .png`; of hidden folders
    nothing."""
    folder = Path(source.path).expanduser()
    if kind_of(source.path) != "local" or not is_main_process() or not folder.is_dir():
        return
    paths = sorted(Path(name) for name, _ in walk(folder))
    paths = [path for path in paths if not any(part.startswith(".") for part in path.parts[:-1])]
    read = Counter(format_of(path.name).removeprefix(".") for path in paths if is_document(str(path)))
    skipped = Counter(path.suffix or path.name for path in paths if not is_document(str(path)))
    parts = [f"{count:,} {name}" for name, count in read.most_common()]
    if links := sorted(path.name for path in folder.iterdir() if path.is_symlink() and not path.is_file()):
        parts.append(f"not followed: the link(s) {', '.join(links)}")
    if skipped:
        parts.append(f"{skipped.total():,} skipped: {', '.join(sorted(skipped))}")
    log.info(f"{source.path}: {', '.join(parts)}")


def states_of(source: DocumentSource, key: str) -> list[tuple[str, int, str]]:
    """Name, size and version (time of change, or the server's tag) of each file: equal states, equal content.

    There is none of a function, and of a dataset on the Hub that only `datasets` can read.
    """
    files = files_of(source, key)
    if kind_of(source.path) == "local":
        return [(str(Path(file.name).absolute()), file.size, file.version) for file in files]
    return [(file.name, file.size, file.version) for file in files]


def hash_file(file: Path | str, key: str) -> str:
    """xxh3-128 of a file's bytes."""
    digest = xxh3_128()
    try:
        with open_plain(str(file)) as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    except OSError as problem:
        raise cannot_read(str(file), problem, key) from problem
    return digest.hexdigest()


def cannot_read(file: str, problem: Exception, key: str) -> CptError:
    """What to say of a file that the machine, or a server, does not give us."""
    if is_hub_file(file):
        return cannot_fetch(file, problem, key)
    reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else first_line(problem)
    return DataError(f"{file}: cannot be read ({reason}). Set `{key}.path`.")
