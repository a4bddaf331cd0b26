"""What the store holds: its entries, whether they are still what was written, and how to be rid of them."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cpt.data.store.folder import lock_file, size_of
from cpt.data.store.source_description import SourceDescription, read_description
from cpt.data.store.token_files import TokenFiles
from cpt.errors import DataError

Kind = Literal["tokens", "rows", "duplicates"]
KINDS: tuple[Kind, ...] = ("tokens", "rows", "duplicates")
State = Literal["complete", "unfinished", "other version", "damaged"]
LEFT_BEHIND = (".unfinished", ".removed")


@dataclass(frozen=True)
class Entry:
    """A folder of the store."""

    folder: Path
    kind: Kind
    state: State
    num_bytes: int
    unused_seconds: float
    """Since a process last opened it."""
    description: SourceDescription | None
    """Of complete tokens."""


def entries(cache_dir: Path) -> list[Entry]:
    """Everything in the store, what was used last first."""
    found = [entry_of(folder, kind) for kind in KINDS for folder in (cache_dir / kind).glob("*") if folder.is_dir()]
    return sorted(found, key=lambda entry: entry.unused_seconds)


def entry_of(folder: Path, kind: Kind) -> Entry:
    """A folder, with what it says of itself."""
    description: SourceDescription | None = None
    state: State = "unfinished" if folder.suffix in LEFT_BEHIND else "complete"
    if state == "complete" and kind == "tokens":
        try:
            description = read_description(folder)
        except FileNotFoundError:
            state = "unfinished"
        except DataError:
            state = "other version"
        except (OSError, ValueError, TypeError):
            state = "damaged"
    return Entry(folder, kind, state, size_of(folder), max(0.0, time.time() - folder.stat().st_mtime), description)


def complaint(entry: Entry) -> str | None:
    """What is wrong with stored tokens, after reading all of them; None where they are what was written."""
    if entry.description is None:
        return (
            f"{entry.folder}: its description is damaged. Delete the folder; it is made again."
            if entry.state == "damaged"
            else None
        )
    for name, digest in entry.description.shards.items():
        try:
            files = TokenFiles(entry.folder / name)
        except DataError as problem:
            return str(problem)
        if files.description.digest != digest or not files.is_sound():
            return f"{files.folder}: the stored tokens are not what was written. Delete the folder; it is made again."
    return None


def to_prune(
    found: Sequence[Entry], *, unused_days: float | None, keep_bytes: int | None, leftovers: bool
) -> list[Entry]:
    """Which entries go.

    Args:
        found: what was used last first.
        unused_days: whatever no process has opened for so long.
        keep_bytes: so much may stay; what was not used for longest goes first.
        leftovers: what killed runs and other versions of cpt left behind.
    """
    chosen, kept = [], 0
    for entry in found:
        is_leftover = leftovers and entry.state != "complete"
        is_old = unused_days is not None and entry.unused_seconds > unused_days * 86_400
        if is_leftover or is_old or (keep_bytes is not None and kept + entry.num_bytes > keep_bytes):
            chosen.append(entry)
        else:
            kept += entry.num_bytes
    return chosen


def remove(entry: Entry) -> bool:
    """Remove an entry; False if a running process reads or makes it."""
    with (
        alone(entry.folder) as nobody_reads,
        alone(lock_file(entry.folder.with_name(made_of(entry.folder)))) as nobody_makes,
    ):
        if not (nobody_reads and nobody_makes):
            return False
        removed = entry.folder.with_name(f"{entry.folder.stem}.removed")
        shutil.rmtree(removed, ignore_errors=True)
        if entry.folder != removed:
            entry.folder.rename(removed)  # half of it is never taken for the whole
        shutil.rmtree(removed, ignore_errors=True)
        return True


def made_of(folder: Path) -> str:
    """The name of the entry that a leftover was to become."""
    return folder.name.partition(".")[0]


@contextmanager
def alone(path: Path) -> Iterator[bool]:
    """True while no other process holds a lock on a file or folder; true too where there is none."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(handle)
