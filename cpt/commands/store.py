"""`cpt store list|verify|prune`: manage the tokens that are stored between runs."""

import fcntl
import os
import shutil
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cpt.cache import default_cache_dir, lock_file, size_of
from cpt.data.store.token_files import SourceDescription, is_intact_shard, read_description
from cpt.errors import DataError
from cpt.formatting import format_bytes, format_duration, open_console

KINDS = ("tokens", "rows", "duplicates")
LEFT_BEHIND = (".unfinished", ".removed")


@dataclass(frozen=True)
class Entry:
    folder: Path
    kind: str
    is_complete: bool  # and of this version of cpt
    num_bytes: int
    unused_seconds: float  # since a process last opened it
    description: SourceDescription | None  # of complete tokens


def entries(cache_dir: Path) -> list[Entry]:
    """Return the stored entries, the last used first."""
    found = []
    for kind in KINDS:
        for folder in (path for path in (cache_dir / kind).glob("*") if path.is_dir()):
            description, is_complete = None, folder.suffix not in LEFT_BEHIND
            if is_complete and kind == "tokens":
                try:
                    description = read_description(folder)
                except (DataError, OSError, ValueError, TypeError):
                    is_complete = False
            unused = max(0.0, time.time() - folder.stat().st_mtime)
            found.append(Entry(folder, kind, is_complete, size_of(folder), unused, description))
    return sorted(found, key=lambda entry: entry.unused_seconds)


COMMANDS = {  # name -> module:function
    "list": "cpt.commands.store:list_command",
    "verify": "cpt.commands.store:verify_command",
    "prune": "cpt.commands.store:prune_command",
}


def list_command() -> None:
    """List the stored entries, the last used first.

    Example: cpt store list
    """
    found = entries(default_cache_dir())
    table = Table("entry", "what", "source", "tokenizer", "tokens", "size", "last used")
    for entry in found:
        what = entry.kind if entry.is_complete else f"{entry.kind}, incomplete or old"
        known, about = entry.description, ("", "", "")
        if known is not None:
            about = (
                known.made_from.get("source", ""),
                known.made_from.get("tokenizer", ""),
                f"{known.tokens:,}",
            )
        size, unused = format_bytes(entry.num_bytes), format_duration(entry.unused_seconds)
        table.add_row(entry.folder.name[:12], what, *about, size, f"{unused} ago")
    console = open_console()
    console.print(table)
    total = format_bytes(sum(entry.num_bytes for entry in found))
    console.print(f"{default_cache_dir()}: {len(found)} entries, {total}", markup=False)


def verify_command() -> None:
    """Read all stored tokens and compare them with their digests; exit code 2 if any is damaged.

    Example: cpt store verify
    """
    tokens = [entry for entry in entries(default_cache_dir()) if entry.kind == "tokens"]
    known = [(entry.folder, entry.description) for entry in tokens if entry.description is not None]
    shards = [folder / name for folder, description in known for name in description.shards]
    if damaged := [str(shard) for shard in shards if not is_intact_shard(shard)]:
        raise DataError(
            f"damaged: {', '.join(damaged)}. Delete these folders; the next run makes them again."
        )
    typer.echo(
        f"Intact: {len(known)}. Skipped (incomplete or of another version): {len(tokens) - len(known)}."
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
    freed = 0
    for entry in entries(default_cache_dir()):
        is_old = unused_days is not None and entry.unused_seconds > unused_days * 86_400
        if entry.is_complete and not is_old:
            continue
        is_removed = dry_run or remove(entry.folder)
        action = ("would remove" if dry_run else "removed") if is_removed else "in use, kept:"
        size, unused = format_bytes(entry.num_bytes), format_duration(entry.unused_seconds)
        typer.echo(f"{action} {entry.kind}/{entry.folder.name} ({size}, last used {unused} ago)")
        freed += entry.num_bytes if is_removed else 0
    typer.echo(f"{format_bytes(freed)} {'would be ' if dry_run else ''}freed.")


def remove(folder: Path) -> bool:
    """Remove an entry's folder; False if a running process reads or makes it."""
    with ExitStack() as held:
        for path in (folder, lock_file(folder.with_name(folder.name.partition(".")[0]))):
            with suppress(FileNotFoundError):
                handle = os.open(path, os.O_RDONLY)
                held.callback(os.close, handle)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
        removed = folder.with_name(f"{folder.stem}.removed")
        shutil.rmtree(removed, ignore_errors=True)
        if folder != removed:
            folder.rename(removed)  # so that a partly removed entry is never read
        shutil.rmtree(removed, ignore_errors=True)
        return True
