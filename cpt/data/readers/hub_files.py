"""Which files a dataset on the Hub is made of, at which commit: found as `datasets` finds them, to be read like any
others."""

import json
import logging
import re
import time
from collections.abc import Sequence
from functools import cache
from os.path import commonpath
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xxhash import xxh3_128_hexdigest

from cpt.data.documents import File
from cpt.data.readers.formats import READERS
from cpt.data.readers.hub_errors import (
    HUB_FILE,
    Unreachable,
    cannot_fetch,
    failures,
    parts_of,
    unreachable,
    what_it_means,
)
from cpt.data.readers.opening import format_of
from cpt.data.store.folder import cannot_keep, default_cache_dir, write_once
from cpt.errors import DataError, ResourceError
from cpt.files import read_sealed, sealed
from cpt.ranks import is_main_process
from cpt.recipe.schema import DocumentSource

if TYPE_CHECKING:
    from datasets import BuilderConfig, DatasetBuilder

log = logging.getLogger("cpt")
COMMIT = re.compile(r"[0-9a-f]{40}")
SPLIT = re.compile(r"[\w.-]+")
NO_OPTIONS = {"name", "version", "data_dir", "data_files", "description"}  # of a builder's configuration
STARTED = time.time()
WAIT_SECONDS = (1, 2, 4, 8)  # between asking a Hub that is down


class HubDataset(NamedTuple):
    """What a source on the Hub is."""

    commit: str
    files: list[File] | None
    """`hf://datasets/owner/name@commit/file` with its size and what git calls its content; None of what only
    `datasets` can read."""


class Asked(NamedTuple):
    """All that decides which files they are."""

    endpoint: str
    path: str
    subset: str | None
    split: str
    data_files: tuple[str, ...]
    revision: str | None


def hub_files(source: DocumentSource, key: str) -> HubDataset:
    """The files of a source on the Hub, at one commit as long as this process lives.

    They are those that `datasets.load_dataset` would read for the source's subset, split and data_files, from what the
    dataset's card says or else by their names. They are ours to read where each is of a kind we know and the card sets
    no options for the reading (another separator, a field of a JSON file). A txt file is what `text_documents` says.

    What was found is remembered in the cache: where the Hub cannot be reached the dataset is taken as it was last, and
    one whose revision is a commit is asked for only once.

    Raises:
        DataError: there is no such dataset, revision, subset, split or file.
        ResourceError: the Hub cannot be reached, or does not let us in.
    """
    from huggingface_hub import constants

    asked = Asked(
        constants.ENDPOINT, source.path, source.subset, source.split, tuple(source.data_files), source.revision
    )
    return find(asked, key)


@cache
def find(asked: Asked, key: str) -> HubDataset:
    """From memory where that cannot have changed, else from the Hub."""
    memory = default_cache_dir() / "hub" / f"{xxh3_128_hexdigest(json.dumps(asked).encode())}.json"
    remembered = recall(memory)
    is_pinned = asked.revision is not None and COMMIT.fullmatch(asked.revision) is not None
    # What the main process has just found is what all processes of the run read.
    if remembered and (is_pinned or not is_main_process() and memory.stat().st_mtime >= STARTED):
        return remembered
    try:
        found = ask(asked, key)
    except Unreachable as problem:
        if remembered is None:
            raise ResourceError(unreachable(asked.path, key, problem)) from problem
        if is_main_process():
            log.warning(f"{asked.path}: the Hub cannot be reached. Taken as it was last: commit {remembered.commit}.")
        return remembered
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise cannot_keep(memory.parent, problem) from problem
    write_once(memory, sealed(found._asdict()))
    return found


def recall(memory: Path) -> HubDataset | None:
    """What was found the last time."""
    found = read_sealed(memory)
    if found is None:
        return None
    return HubDataset(found["commit"], None if found["files"] is None else [File(*file) for file in found["files"]])


def ask(asked: Asked, key: str) -> HubDataset:
    """What the Hub says now.

    Raises:
        Unreachable: nothing.
    """
    try:
        commit = commit_of(asked.endpoint, asked.path, asked.revision)
        builder = build(asked, commit)
        files = files_at(builder, asked, key)
        return HubDataset(commit, None if files is None else with_sizes(files))
    except failures() as problem:
        if (meant := what_it_means(problem, asked.path, asked.revision, key)) is not None:
            raise meant from problem
        raise DataError(
            f"{asked.path}: not a dataset on the Hub that can be read: {' '.join(str(problem).split())[:500]} "
            f"Set `{key}.path`, `.subset`, `.split`, `.data_files` or `.revision`."
        ) from problem


@cache
def commit_of(endpoint: str, dataset: str, revision: str | None) -> str:
    """The commit of a branch or tag; asked once, so that all sources from one dataset are of one commit."""
    from huggingface_hub import HfApi

    return str(HfApi(endpoint).dataset_info(dataset, revision=revision).sha)


def build(asked: Asked, commit: str) -> "DatasetBuilder":
    """What `datasets` would read the source with; nothing is downloaded but the dataset's card."""
    import datasets

    files = list(asked.data_files) or None
    builder = datasets.load_dataset_builder(asked.path, asked.subset, data_files=files, revision=commit)
    if builder.hash != commit:  # where it cannot get through, it takes what its cache holds
        raise ConnectionError("the connection broke")
    return builder


def files_at(builder: "DatasetBuilder", asked: Asked, key: str) -> Sequence[str] | None:
    """The files of the split; None where they are not ours to read."""
    splits = builder.config.data_files
    if (
        not splits or asked.split == "all" or not SPLIT.fullmatch(asked.split)
    ):  # `train[:10%]`, `train+test`: for `datasets` to find
        return None
    if asked.split not in splits:
        raise DataError(
            f"{asked.path}: no split `{asked.split}`. It has: {', '.join(map(str, splits))}. Set `{key}.split`."
        )
    files = list(splits[asked.split])
    readable = all(HUB_FILE.fullmatch(file) and "::" not in file and format_of(file) in READERS for file in files)
    return files if readable and not has_options(builder.config, files) else None


def has_options(config: "BuilderConfig", files: Sequence[str]) -> bool:
    """True where the dataset's card says how to read the files; tabs between the fields of tsv files go without
    saying."""
    plain = vars(type(config)())
    if {format_of(file) for file in files} == {".tsv"}:
        plain["sep"] = "\t"
    return any(value != plain.get(name) for name, value in vars(config).items() if name not in NO_OPTIONS)


def with_sizes(files: Sequence[str]) -> list[File]:
    """What the Hub lists of the files: it gives a thousand at a time."""
    import fsspec

    system, _ = fsspec.core.url_to_fs(files[0])
    folder = commonpath([file.rpartition("/")[0].removeprefix("hf://") for file in files])
    listed: dict[str, dict[str, Any]] = system.find(folder, detail=True)
    return [as_file(file, listed[file.removeprefix("hf://")]) for file in files]


def as_file(name: str, info: dict[str, Any]) -> File:
    """A file of git's, or one that only its hash is in git of."""
    return File(name, int(info["size"]), str(info["lfs"]["sha256"] if info.get("lfs") else info["blob_id"]))


def fetch(path: str, key: str) -> str:
    """A file of the Hub in the Hub's cache on this machine, where it is downloaded to if it is not there.

    Raises:
        DataError: there is no such file.
        ResourceError: the Hub cannot be reached, or does not let us in.
    """
    from huggingface_hub import constants, hf_hub_download

    dataset, commit, file = parts_of(path)
    waits = iter(WAIT_SECONDS)
    while True:
        try:
            return str(hf_hub_download(dataset, file, repo_type="dataset", revision=commit))
        except (
            failures()
        ) as problem:  # it resumes by itself what breaks off, and waits where there are too many requests
            is_for_now = (
                isinstance(what_it_means(problem, dataset, commit, key), Unreachable) and not constants.HF_HUB_OFFLINE
            )
            wait = next(waits, None) if is_for_now else None
            if wait is None:
                raise cannot_fetch(path, problem, key) from problem
        time.sleep(wait)
