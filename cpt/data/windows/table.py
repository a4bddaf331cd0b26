"""What is known of all windows of a source in one table, once the last one was made, so that a start reads two files
and not one a window.

The table is memory-mapped: a process that looks for a row touches as much of it as a search does. What is only told,
and never searched by (documents left out, lengths, bad rows), is kept as a sum over all windows beside it.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from cpt.data.store.bucket import bucket
from cpt.data.store.folder import open_array, write_once
from cpt.data.windows.entry import Total, WindowEntry, entry_of, summed
from cpt.files import read_sealed, report_damage, sealed, size_and_hash, unsealed

TOTAL, TABLE = "total.json", "windows.npy"
COUNTS = [field.name for field in fields(WindowEntry) if field.type is int]
DIGESTS = ("own_digest", "digest")
LINE = np.dtype([*((name, np.int64) for name in COUNTS), *((name, "S32") for name in DIGESTS)])


def write_table(folder: Path, entries: Sequence[WindowEntry]) -> None:
    """Write what is known of all windows, the table first: where the total stands, all is there."""
    table = np.array([tuple(vars(entry)[name] for name in (*COUNTS, *DIGESTS)) for entry in entries], LINE)
    write_once(folder / TABLE, lambda path: save(path, table))
    digest = size_and_hash(folder / TABLE)[1]
    write_total(folder, entries[-1].end, len(entries), {"sum": asdict(summed(entries)), "table": digest})


def write_total(folder: Path, rows: int, windows: int, besides: Mapping[str, Any] | None = None) -> None:
    """Write what one time through is."""
    write_once(folder / TOTAL, sealed({"rows": rows, "windows": windows, **(besides or {})}))


def save(path: Path, table: NDArray[Any]) -> None:
    """As a .npy file, whatever its name."""
    with path.open("wb") as file:
        np.save(file, table)


def write_bytes(path: Path, content: bytes) -> None:
    """All of a file."""
    path.write_bytes(content)


def read_total(folder: Path) -> Total | None:
    """What one time through is; None where its last window was not made yet, or where the total or the table is
    damaged."""
    content = read_sealed(folder / TOTAL)
    digest = None if content is None else content.get("table")
    if digest is not None and not is_table(folder / TABLE, digest):
        report_damage(folder / TABLE)
        content = None
    if content is None:
        with suppress(OSError):
            (folder / TOTAL).unlink()  # else each look at it would report the damage
        return None
    everything = content.get("sum")
    return Total(
        content["rows"], content["windows"], digest is not None, None if everything is None else entry_of(everything)
    )


def is_table(path: Path, digest: str) -> bool:
    """Whether a table is there and what was written."""
    return path.exists() and size_and_hash(path)[1] == digest


def fetch_table(folder: Path) -> bool:
    """Whether a bucket has the table; then it is in the folder.

    Raises:
        DataError: it is damaged.
    """
    store = bucket()
    total = store.read(f"rows/{folder.name}/{TOTAL}") if store is not None else None
    if store is None or total is None:
        return False
    table = store.read(f"rows/{folder.name}/{TABLE}")
    try:
        is_sound = table is not None and xxh3_128_hexdigest(table) == unsealed(total)["table"]
    except ValueError:
        is_sound = False
    if table is None or not is_sound:
        raise store.damaged(f"rows/{folder.name}/{TABLE}")
    write_once(folder / TABLE, lambda path: write_bytes(path, table))
    write_once(folder / TOTAL, total.decode())
    return True


def open_table(folder: Path) -> NDArray[Any]:
    """The table, memory-mapped.

    Raises:
        OSError: there is none.
    """
    return open_array(folder / TABLE)


def entry_in(table: NDArray[Any], window: int) -> WindowEntry:
    """A window as the table knows it: without what is only kept as a sum."""
    line = table[window]
    counts = {name: int(line[name]) for name in COUNTS}
    digests = {name: line[name].decode() for name in DIGESTS}
    return entry_of({**counts, **digests, "left_out": {}, "bad_rows": {}, "lengths": {}, "longest": ("", 0)})
