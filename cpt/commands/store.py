"""`cpt store list|verify|prune`: manage the tokens that are stored between runs."""

import os
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cpt.cache import default_cache_dir, lock_file, size_of
from cpt.data.store.token_files import SourceDescription, is_intact_shard, read_description
from cpt.errors import DataError, ResourceError
from cpt.files import LEAVING, lock_open_file, remove_folder
from cpt.formatting import format_bytes, format_duration, open_console

KINDS = ("tokens", "rows", "duplicates")
LEFT_BEHIND = (".unfinished", ".removed")  # `.removed` by earlier versions
COMMANDS = {  # name -> module:function
    "list": "cpt.commands.store:list_command",
    "verify": "cpt.commands.store:verify_command",
    "prune": "cpt.commands.store:prune_command",
}


@dataclass(frozen=True)
class Entry:
    folder: Path
    kind: str
    is_complete: bool
    """And of this version of cpt."""
    num_bytes: int
    unused_seconds: float
    """Since a process last opened it."""
    description: SourceDescription | None
    """None for other entries, and for incomplete tokens."""

    @property
    def unused(self) -> str:
        return f"{format_duration(self.unused_seconds)} ago"


def list_command() -> None:
    """List the stored entries, the last used first.

    Example: cpt store list
    """
    entries = read_entries(default_cache_dir())
    table = Table("entry", "what", "source", "tokenizer", "tokens", "size", "last used")
    for entry in entries:
        kind = entry.kind if entry.is_complete else f"{entry.kind}, incomplete or old"
        cells = ["", "", ""]
        if entry.description is not None:
            made_from = entry.description.made_from
            cells = [
                made_from.get("source", ""),
                made_from.get("tokenizer", ""),
                f"{entry.description.tokens:,}",
            ]
        size = format_bytes(entry.num_bytes)
        table.add_row(entry.folder.name[:12], kind, *cells, size, entry.unused)
    console = open_console()
    console.print(table)
    total = format_bytes(sum(entry.num_bytes for entry in entries))
    console.print(f"{default_cache_dir()}: {len(entries)} entries, {total}", markup=False)


def read_entries(cache_dir: Path) -> list[Entry]:
    """Return the stored entries, the last used first."""
    entries = []
    for kind in KINDS:
        for folder in (cache_dir / kind).glob("*"):
            if not folder.is_dir():
                continue
            description = None
            is_complete = folder.suffix not in LEFT_BEHIND and not folder.name.startswith(LEAVING)
            if is_complete and kind == "tokens":
                try:
                    description = read_description(folder)
                except (DataError, OSError, ValueError, TypeError):
                    is_complete = False
            entry = Entry(
                folder=folder,
                kind=kind,
                is_complete=is_complete,
                num_bytes=size_of(folder),
                unused_seconds=max(0.0, time.time() - folder.stat().st_mtime),
                description=description,
            )
            entries.append(entry)
    return sorted(entries, key=lambda entry: entry.unused_seconds)


def verify_command() -> None:
    """Read all stored tokens and compare them with their digests; exit code 2 if any is damaged.

    Example: cpt store verify
    """
    num_verified = 0
    num_skipped = 0
    damaged = []
    for entry in read_entries(default_cache_dir()):
        if entry.description is not None:
            num_verified += 1
            shards = [entry.folder / name for name in entry.description.shards]
            for shard in shards:
                if not is_intact_shard(shard):
                    damaged.append(str(shard))
        elif entry.kind == "tokens":
            num_skipped += 1
    if damaged:
        raise DataError(
            f"damaged: {', '.join(damaged)}. Delete these folders; the next run makes them again."
        )
    typer.echo(
        f"Intact: {num_verified}. Skipped (incomplete or of another version): {num_skipped}."
    )


def prune_command(
    unused_days: Annotated[
        float | None, typer.Option(min=0, help="Remove entries unused for this many days.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be removed.")
    ] = False,
) -> None:
    """Remove old entries and leftovers of killed runs and of other versions of cpt. Entries in use are kept.

    Example: cpt store prune --unused-days 30 --dry-run
    """
    freed_bytes = 0
    for entry in read_entries(default_cache_dir()):
        is_old = unused_days is not None and entry.unused_seconds > unused_days * 86_400
        if entry.is_complete and not is_old:
            continue
        if dry_run:
            action = "would remove"
            freed_bytes += entry.num_bytes
        elif remove(entry.folder):
            action = "removed"
            freed_bytes += entry.num_bytes
        else:
            action = "in use, kept:"
        size = format_bytes(entry.num_bytes)
        name = f"{entry.kind}/{entry.folder.name}"
        typer.echo(f"{action} {name} ({size}, last used {entry.unused})")
    outcome = "would be freed" if dry_run else "freed"
    typer.echo(f"{format_bytes(freed_bytes)} {outcome}.")


def remove(folder: Path) -> bool:
    """Remove an entry's folder; False if a running process reads or makes it."""
    name, *_ = folder.name.removeprefix(LEAVING).split(".")
    with ExitStack() as handles:
        for path in (folder, lock_file(folder.with_name(name))):
            with suppress(FileNotFoundError):
                handle = os.open(path, os.O_RDONLY)
                handles.callback(os.close, handle)
                try:
                    is_locked = lock_open_file(handle, wait_seconds=0)
                except BlockingIOError:
                    return False
                if not is_locked:
                    raise ResourceError(
                        f"{folder}: this disk has no locks, which show that an entry is in use."
                        " Delete the folder yourself if no run uses it."
                    )
        remove_folder(folder)
        return True
