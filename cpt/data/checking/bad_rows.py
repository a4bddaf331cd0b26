"""What becomes of bad rows: they end the run, are skipped and listed, or are kept aside with all that is in them."""

import base64
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from cpt.data.documents import BadRow, Document
from cpt.errors import DataError

OnBadRow = Literal["error", "skip", "quarantine"]
Listed = dict[str, Any]  # a bad row as a line of bad_rows.jsonl
FILE_NAME = "bad_rows.jsonl"
SHOWN = 5
ABSURD_SHARE = 0.2  # of a source's tokens in one document
REMEDIES = {
    "missing column": "Set `{key}.text_column`.",
    "null": "Fix or remove the row, or set another `{key}.text_column`.",
    "wrong type": "Fix or remove the row, or set another `{key}.text_column`.",
    "missing columns": "Write it in `{key}`.",
    "texts and messages": "Fix or remove the row, or set other columns: `{key}.chat`.",
    "no value": "Fix or remove the row, or set other columns: `{key}.chat`.",
    "wrong value": "Fix or remove the row, or set other columns: `{key}.chat`.",
    "not a chat": "Fix or remove the row, or set another `{key}.chat`.",
    "invalid UTF-8": (
        "Convert it (iconv -f latin1 -t utf-8), remove it, or let `data.on_bad_row` skip such rows ({key}.path)."
    ),
    "UTF-16": (
        "Convert it (iconv -f utf-16 -t utf-8), remove it, or let `data.on_bad_row` skip such rows ({key}.path)."
    ),
    "empty file": "Fill it, or leave it out of `{key}.path`.",
    "no rows": "Fill it, or leave it out of `{key}.path`.",
    "damaged file": "Write the file anew, or leave it out of `{key}.path`.",
}
REMEDY = "Fix or remove it, or let `data.on_bad_row` skip such rows ({key}.path)."


def apply_policy(
    items: Iterable[Document | BadRow], policy: OnBadRow, key: str, found: list[Listed]
) -> Iterator[Document]:
    """The documents among what a reader gives.

    With several processes, each applies it to its own pieces; the lists are put together in the order of the pieces.
    When all is read, call `refuse_too_many` and, if anything was found, `write_bad_rows` beside the stored tokens.

    Args:
        policy: the recipe's `data.on_bad_row`.
        key: where the source stands in the recipe, for messages.
        found: takes the bad rows that do not end the run.

    Raises:
        DataError: a bad row, under the policy `error`.
    """
    for item in items:
        if isinstance(item, Document):
            yield item
        elif policy == "error":
            raise DataError(complaint(item, key))
        else:
            found.append(listed(item, with_raw=policy == "quarantine"))


def complaint(bad: BadRow, key: str) -> str:
    """What is wrong, where, and what to do."""
    at = "" if bad.byte is None else f" Byte {bad.byte:,} of the file."
    return f"{bad.where}: {bad.detail}.{at} {REMEDIES.get(bad.reason, REMEDY).format(key=key)}"


def listed(bad: BadRow, *, with_raw: bool) -> Listed:
    """A bad row as it is kept; raw bytes that are no UTF-8 are written in base64."""
    row: Listed = {
        "where": bad.where,
        "byte": bad.byte,
        "reason": bad.reason,
        "detail": bad.detail,
        "rows": bad.num_rows,
    }
    if with_raw and bad.raw is not None:
        try:
            row["raw"] = bad.raw.decode()
        except UnicodeDecodeError:
            row["raw_base64"] = base64.b64encode(bad.raw).decode()
    return row


def refuse_too_many(
    num_bad: int, num_good: int, max_share: float, path: str, key: str, listed: Iterable[Listed]
) -> None:
    """Stop where more of a source is bad than the recipe allows.

    Args:
        num_good: rows, those that filters dropped included.
        max_share: the recipe's `data.max_bad_share`.
        path: of the source.
        listed: the bad rows, of which the first are shown.

    Raises:
        DataError: with the first bad rows.
    """
    share = num_bad / max(1, num_bad + num_good)
    if share > max_share:
        first = "; ".join(f"{row['where']}: {row['detail']}" for row in islice(listed, SHOWN))
        raise DataError(
            f"{path}: {num_bad:,} of {num_bad + num_good:,} rows are bad ({share:.2%}), more than `data.max_bad_share`"
            f" allows ({max_share:.2%}). The first: {first}. Look at all of them: cpt data check. Fix the files"
            f" ({key}.path), or raise the share."
        )


def count_reasons(found: Iterable[Listed]) -> dict[str, int]:
    """Reason -> rows, for reports."""
    counts: Counter[str] = Counter()
    for row in found:
        counts[row["reason"]] += row["rows"]
    return dict(counts)


def write_bad_rows(found: Sequence[Listed], folder: Path) -> None:
    """List them in `bad_rows.jsonl`, one a line; no file where there are none."""
    if not found:
        (folder / FILE_NAME).unlink(missing_ok=True)
        return
    (folder / FILE_NAME).write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found), encoding="utf-8"
    )


def absurd_share(name: str, where: str, size: int, total: int, num_documents: int, unit: str = "tokens") -> str | None:
    """A warning where one document is an absurd part of a source; none for a source of so few documents that one has
    to be.

    Args:
        where: the address of the longest document, empty where it is not known.
        size: its length, in `unit`.
        total, num_documents: of the source.
    """
    if num_documents < 2 / ABSURD_SHARE or size <= ABSURD_SHARE * total:
        return None
    return (
        f"{name}: one of {num_documents:,} documents{f' ({where})' if where else ''} makes up {size / total:.0%} of"
        f" the {unit}. Is it one document? The filter `length` with `max_characters` drops such."
    )
