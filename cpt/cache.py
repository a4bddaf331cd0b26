"""The cache folder, whose subfolders are either complete or absent, even if several processes write them."""

import os
import shutil
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from socket import gaierror
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpt.errors import ResourceError
from cpt.files import (
    NO_SPACE,
    Content,
    files_in,
    hashes_of,
    lock_open_file,
    locked,
    make_all_durable,
    make_durable,
    report_damage,
    sealed,
    unsealed,
    write_atomic,
)
from cpt.files import key_of as key_of

DIGESTS = "digests.json"  # file with the hashes of a folder of derived files


def default_cache_dir() -> Path:
    return Path(os.environ.get("CPT_CACHE") or "~/.cache/cpt").expanduser()


def publish_once(
    folder: Path,
    fill: Callable[[Path], None],
    *,
    durable: bool = True,
    is_intact: Callable[[Path], bool] = Path.exists,
) -> Path:
    """Call `fill` on a new folder, then rename it to `folder`; do nothing if `folder` exists.

    One process fills, others wait for it. On a file system without locks between machines, two machines may fill at
    the same time, each its own folder; the first one to finish is used.

    Args:
        durable: wait for the disk, so that the folder survives a power cut and not only a killed process.
        is_intact: whether an existing folder is intact; a damaged one is made again, and logged.
    """
    if folder.exists() and is_intact(folder):
        return folder
    try:
        with locked(lock_file(folder)) as is_locked:
            # Another process may have repaired it in the meantime.
            if folder.exists() and not is_intact(folder):
                report_damage(folder)
                shutil.rmtree(folder)
            if not folder.exists():
                # Locks may not reach other machines. Without locks, each process and thread has its own folder.
                host = socket.gethostname()
                owner = host if is_locked else f"{host}-{os.getpid()}-{threading.get_ident()}"
                unfinished = folder.with_name(f"{folder.name}.{owner}.unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                try:
                    fill(unfinished)
                    if durable:
                        make_all_durable(unfinished)
                    unfinished.rename(folder)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)  # already renamed after a success
                if durable:
                    make_durable(folder.parent)
    except OSError as problem:
        if not folder.is_dir():  # no other machine was faster
            raise cannot_keep(folder.parent, problem) from problem
    return folder


def publish_derived(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Like `publish_once`, but verify hashes at each call: a damaged folder is made again."""

    def fill_and_seal(unfinished: Path) -> None:
        fill(unfinished)
        (unfinished / DIGESTS).write_text(sealed(hashes_of(files_in(unfinished))))

    return publish_once(folder, fill_and_seal, is_intact=has_intact_files)


def has_intact_files(folder: Path) -> bool:
    """Whether the files of a folder from `publish_derived` are intact."""
    try:
        digests = unsealed((folder / DIGESTS).read_bytes())
        return hashes_of({name: folder / name for name in digests}) == digests
    except (OSError, ValueError):
        return False


def lock_file(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


def hold(folder: Path, holder: object) -> Callable[[], object]:
    """Keep `cpt store prune` away from a folder while `holder` lives, or until the returned function is called.

    Makes the folder if it is missing. Its modification time is the last use.
    """
    try:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY)
            lock_open_file(handle, shared=True)
            if folder.exists() and os.fstat(handle).st_ino == folder.stat().st_ino:
                break
            os.close(handle)  # it was removed in between
    except OSError as problem:
        raise cannot_keep(folder.parent, problem) from problem
    with suppress(OSError):  # a read-only store
        os.utime(handle)
    return weakref.finalize(holder, os.close, handle)


def cannot_keep(folder: Path, problem: OSError) -> ResourceError:
    remedy = "Free space, or set" if problem.errno in NO_SPACE else "Set"
    return ResourceError(
        f"{folder}: cannot store tokenized data there ({problem.strerror or problem})."
        f" {remedy} another folder: export CPT_CACHE=/path/to/folder"
    )


def write_once(path: Path, content: Content) -> None:
    """Write a small file that is complete or absent, even after a power cut: text, bytes, or a function that writes
    to a given path."""
    try:
        write_atomic(path, content, durable=True)
    except OSError as problem:
        raise cannot_keep(path.parent, problem) from problem


def open_array(path: Path) -> NDArray[Any]:
    """Memory-map a .npy file without the cost of numpy's memmap class on every slice."""
    return np.asarray(np.load(path, mmap_mode="r"))


def size_of(folder: Path) -> int:
    """Return the bytes of all files below; files and folders removed meanwhile do not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


# --- the Hub: check once whether it is reachable, before a library retries for a minute ---


SECONDS_TO_ANSWER = 5
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def refuse_unreachable(
    key: str, path: str, revision: str | None, files: tuple[str, ...] = ("config.json",)
) -> None:
    """Refuse a Hub id while the Hub is unreachable, unless one of the files is in the cache; `key` is the recipe's,
    for the message."""
    if any(is_cached(path, file, revision) for file in files):
        return
    reason = why_unreachable()
    if reason:
        raise ResourceError(
            f"{key}: {path} is neither a folder here ({Path.cwd()}) nor in the Hub cache, and the Hub cannot be"
            f" reached ({reason}). Use a local folder, or download it first:"
            f" hf download {path}"
        )


def is_cached(path: str, file: str, revision: str | None) -> bool:
    """Whether a file of a model is in the Hub's cache on this machine."""
    from huggingface_hub import try_to_load_from_cache  # slow; worker processes do not need it

    return isinstance(try_to_load_from_cache(path, file, revision=revision), str)


@cache
def hub_is_reachable() -> bool:
    """Checked once per process."""
    return not why_unreachable()


def why_unreachable() -> str:
    """The reason why the Hub does not answer; empty if it answers."""
    from urllib.error import HTTPError, URLError  # also slow
    from urllib.request import Request, urlopen

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=SECONDS_TO_ANSWER).close()
    except HTTPError:
        return ""  # it answers
    except OSError as problem:
        reason = problem.reason if isinstance(problem, URLError) else problem
        if isinstance(reason, gaierror | TimeoutError | ConnectionError):
            return str(reason)
        # such as certificates: huggingface_hub has settings for them that this check does not use
    return ""
