"""Datasets on the Hub: their files at one commit, and messages for the Hub's errors.

Files are resolved as in `datasets` and read like local ones; other datasets are streamed through `datasets`."""

import json
import logging
import posixpath
import re
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xxhash import xxh3_128_hexdigest

from cpt.cache import cannot_keep, default_cache_dir, write_once
from cpt.data.readers.documents import BadRow, Document, File, Origin, first_line
from cpt.data.readers.example import item_of
from cpt.distributed import is_main_process
from cpt.errors import CptError, DataError, ResourceError
from cpt.files import read_sealed, sealed
from cpt.recipe.paths import DOCUMENT_FILES, format_of
from cpt.recipe.schema import DocumentSource

if TYPE_CHECKING:
    from datasets import DatasetBuilder

log = logging.getLogger("cpt")
HUB_FILE = re.compile(r"hf://datasets/([^/]+/[^/@]+)@([0-9a-f]{40})/(.+)")
COMMIT = re.compile(r"[0-9a-f]{40}")
SPLIT = re.compile(r"[\w.-]+")
NO_OPTIONS = {"name", "version", "data_dir", "data_files", "description"}  # not options for reading
STARTED = time.time()
OF_DATASETS: tuple[type[Exception], ...] = (
    FileNotFoundError,
    ValueError,
    RuntimeError,
)  # or its Hub library
WAIT_SECONDS = (1, 2, 4, 8)  # between retries while the Hub is down


class Unreachable(Exception):  # noqa: N818 -- always caught by the caller
    """The Hub does not answer."""


def parts_of(path: str) -> tuple[str, str, str]:
    match = HUB_FILE.fullmatch(path)
    assert match is not None, path
    return match[1], match[2], match[3]


def is_hub_file(path: str) -> bool:
    return HUB_FILE.fullmatch(path) is not None


def cannot_fetch(path: str, problem: BaseException, key: str) -> CptError:
    dataset, commit, file = parts_of(path)
    meant = what_it_means(problem, dataset, commit, key)
    if isinstance(meant, CptError):
        return meant
    if isinstance(problem, OSError) and problem.errno:
        return ResourceError(
            f"{path}: cannot be saved ({problem.strerror}). Set HF_HOME to another disk."
        )
    return ResourceError(
        f"{path}: not in the Hub's cache, and the Hub cannot be reached ({meant or first_line(problem)}). With network"
        f" access, run: hf download {dataset} {file} --repo-type dataset --revision {commit}"
    )


def cannot_reach(dataset: str, problem: str, key: str) -> ResourceError:
    remedy = f"Go online (HF_HUB_OFFLINE is not 1), or download the dataset and set `{key}.path` to its folder."
    return ResourceError(
        f"{dataset}: no such local path, and the Hub cannot be reached: {problem}. {remedy}"
    )


def unreadable(dataset: str, split: str, problem: str, key: str) -> DataError:
    remedy = f"Set `{key}.path`, `.subset`, `.split`, `.data_files` or `.revision`."
    return DataError(
        f"{dataset}: cannot read this dataset from the Hub with split `{split}`: {problem} {remedy}"
    )


def broken() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    httpx_error: type[Exception] = HfHubHTTPError.__bases__[
        0
    ]  # from httpx or httpx2, depending on its version
    return ConnectionError, TimeoutError, EntryNotFoundError, httpx_error


def what_it_means(
    problem: BaseException | None, dataset: str, revision: str | None, key: str
) -> CptError | Unreachable | None:
    """The error to raise for the first Hub error in a chain of exceptions, or None."""
    from huggingface_hub import errors

    if not isinstance(problem, errors.HfHubHTTPError):
        while problem is not None and not isinstance(problem, broken()):
            problem = problem.__cause__ or problem.__context__
        # `datasets` probes for optional files: after another error, a missing entry is not the cause.
        if problem is None or isinstance(problem, errors.EntryNotFoundError):
            return None
        if not isinstance(problem, errors.HfHubHTTPError):
            return Unreachable(first_line(problem).rstrip("."))
    status = problem.response.status_code
    if isinstance(problem, errors.RevisionNotFoundError):
        return DataError(f"{dataset}: no revision `{revision}` on the Hub. Set `{key}.revision`.")
    if isinstance(problem, errors.RemoteEntryNotFoundError):
        return DataError(
            f"{dataset}: {' '.join(str(problem).split())} Set `{key}.data_files` or `.revision`."
        )
    if status in (401, 403):
        return ResourceError(
            f"{dataset}: not a local path, and on the Hub missing, private or gated ({status}). Run: hf auth login, or"
            f" set HF_TOKEN; accept its terms at https://huggingface.co/datasets/{dataset}; or set `{key}.path`."
        )
    if status == 404:
        return DataError(
            f"{dataset}: neither a local path nor a dataset on the Hub. Set `{key}.path`."
        )
    return Unreachable(f"HTTP status {status}")


class HubDataset(NamedTuple):
    commit: str
    files: list[File] | None
    """`hf://datasets/owner/name@commit/file`, its size and git's hash of it; None if only `datasets` can read them."""


class HubRequest(NamedTuple):
    endpoint: str
    path: str
    subset: str | None
    split: str
    data_files: tuple[str, ...]
    revision: str | None


PINNED: dict[str, str] = {}
"""Commits of the datasets of this process's run, by `named_revision`."""


def named_revision(source: DocumentSource) -> str:
    return f"{source.path}@{source.revision or 'main'}"


def hub_files(source: DocumentSource, key: str) -> HubDataset:
    """Resolve the files that `datasets.load_dataset` would read, at one commit for the life of this process.

    We read them directly if each has a known suffix and the dataset's card sets no reading options (another separator,
    a field of JSON). The result is cached: it is used when the Hub cannot be reached, and a source with a commit hash
    as its revision is looked up only once."""
    from huggingface_hub import constants

    request = HubRequest(
        endpoint=constants.ENDPOINT,
        path=source.path,
        subset=source.subset,
        split=source.split,
        data_files=tuple(source.data_files),
        revision=PINNED.get(named_revision(source), source.revision),
    )
    return find(request, key)


@cache
def find(request: HubRequest, key: str) -> HubDataset:
    file = file_of(request)
    cached: HubDataset | None = None
    stored = read_sealed(file)
    if stored is not None:
        files = stored["files"]
        cached = HubDataset(stored["commit"], files and [File(*content) for content in files])
    is_pinned = request.revision is not None and COMMIT.fullmatch(request.revision) is not None
    # All processes of a run read what the main process has just stored.
    if cached and (is_pinned or not is_main_process() and file.stat().st_mtime >= STARTED):
        return cached
    try:
        dataset = look_up(request, key)
    except Unreachable as problem:
        if cached is None:
            raise cannot_reach(request.path, str(problem), key) from problem
        if is_main_process():
            log.warning(
                f"{request.path}: the Hub cannot be reached. Using its last known commit {cached.commit}."
            )
        return cached
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise cannot_keep(file.parent, problem) from problem
    content = sealed({"commit": dataset.commit, "files": dataset.files})
    write_once(file, content)
    write_once(file_of(request._replace(revision=dataset.commit)), content)  # for a resumed run
    return dataset


def file_of(request: HubRequest) -> Path:
    name = xxh3_128_hexdigest(json.dumps(request).encode())
    return default_cache_dir() / "hub" / f"{name}.json"


def look_up(request: HubRequest, key: str) -> HubDataset:
    try:
        commit = commit_of(request.endpoint, request.path, request.revision)
        import datasets  # slow import (1 s), so only if the Hub responds
        import fsspec

        data_files = list(request.data_files) or None
        # Downloads only the dataset's card.
        builder = datasets.load_dataset_builder(
            request.path, request.subset, data_files=data_files, revision=commit
        )
        if builder.hash != commit:  # offline it uses whatever is cached
            raise ConnectionError("the connection was lost")
        names = readable_files(builder, request, key)
        if names is None:
            return HubDataset(commit, None)
        paths = [name.removeprefix("hf://") for name in names]
        system, _ = fsspec.core.url_to_fs(names[0])
        folder = posixpath.commonpath(list(map(posixpath.dirname, paths)))
        # A thousand files per request.
        listed: dict[str, dict[str, Any]] = system.find(folder, detail=True)
        files = []
        for name, path in zip(names, paths, strict=True):
            info = listed[path]
            version = info["lfs"]["sha256"] if info.get("lfs") else info["blob_id"]
            files.append(File(name, int(info["size"]), str(version)))
        return HubDataset(commit, files)
    except (*OF_DATASETS, *broken()) as problem:
        error = what_it_means(problem, request.path, request.revision, key)
        if error is None:
            details = " ".join(str(problem).split())[:500]
            error = unreadable(request.path, request.split, details, key)
        raise error from problem


@cache
def commit_of(endpoint: str, dataset: str, revision: str | None) -> str:
    """The commit of a branch or tag; cached, so that all sources of a dataset use the same commit."""
    from huggingface_hub import HfApi

    return str(HfApi(endpoint).dataset_info(dataset, revision=revision).sha)


def readable_files(builder: "DatasetBuilder", request: HubRequest, key: str) -> list[str] | None:
    """The files of the split; None if only `datasets` can read them."""
    splits = builder.config.data_files
    # Let `datasets` resolve `train[:10%]` and `train+test`.
    if not splits or request.split == "all" or not SPLIT.fullmatch(request.split):
        return None
    if request.split not in splits:
        has = f"Splits: {', '.join(map(str, splits))}. Set `{key}.split`."
        raise DataError(f"{request.path}: no split `{request.split}`. {has}")
    files = list(splits[request.split])
    for file in files:
        if not is_hub_file(file) or "::" in file or format_of(file) not in DOCUMENT_FILES:
            return None
    defaults = vars(type(builder.config)())
    if set(map(format_of, files)) == {".tsv"}:
        defaults["sep"] = "\t"
    for name, value in vars(builder.config).items():
        if name not in NO_OPTIONS and value != defaults.get(name):
            return None
    return files


def fetch(path: str, key: str) -> str:
    """The local path of a Hub file in the Hub's cache; downloads it if missing."""
    from huggingface_hub import constants, hf_hub_download

    dataset, commit, file = parts_of(path)
    for wait in (*WAIT_SECONDS, None):
        try:
            return str(hf_hub_download(dataset, file, repo_type="dataset", revision=commit))
        except (*OF_DATASETS, *broken()) as problem:
            is_unreachable = isinstance(what_it_means(problem, dataset, commit, key), Unreachable)
            if wait is None or constants.HF_HUB_OFFLINE or not is_unreachable:
                raise cannot_fetch(path, problem, key) from problem
            time.sleep(wait)
    raise AssertionError("unreachable: the last try returns or raises")


def read_hub(source: DocumentSource, key: str, commit: str) -> Iterator[Document | BadRow]:
    # One process reads from the beginning, so the order is the same every time and for any number of processes.
    import datasets  # slow import (1 s), and `cpt check` must be fast

    origin = Origin(source.path, "row")
    try:
        rows = datasets.load_dataset(
            source.path,
            source.subset,
            data_files=source.data_files or None,
            split=source.split,
            revision=commit,
            streaming=source.streaming or source.max_documents is not None,
        )
        for number, row in enumerate(rows, start=1):
            yield item_of(row, source, origin, number)
    except OF_DATASETS as problem:
        raise unreadable(source.path, source.split, first_line(problem), key) from problem
    except OSError as problem:  # includes ConnectionError
        raise cannot_reach(source.path, first_line(problem), key) from problem
