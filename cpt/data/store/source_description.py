"""What stands beside the shards of a source once all are there: its manifest, on the disk and in a bucket."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cpt.data.store.bucket import bucket
from cpt.data.store.token_files import DESCRIPTION, FORMAT
from cpt.errors import DataError
from cpt.files import sealed, unsealed


@dataclass(frozen=True)
class SourceDescription:
    """What stands beside the shards once all are there."""

    name: str
    """Of the source, with its files as they were."""
    documents: int
    tokens: int
    shards: dict[str, str]
    """Name -> digest, in the order of the source."""
    dropped: dict[str, int]
    """Reason -> documents that filters did not let pass."""
    bad_rows: dict[str, int]
    """Reason -> rows that were no documents; bad_rows.jsonl lists them."""
    longest: tuple[str, int]
    """Where the longest document stands, and its tokens."""
    files: dict[str, str]
    """File -> xxh3-128 of its content; of one behind a URL the version that its server told."""
    made_from: dict[str, str]
    """Source, tokenizer and the library that tokenised, for people."""
    on_bad_row: str
    format: int = FORMAT


def as_text(description: SourceDescription) -> str:
    """As JSON with its hash."""
    return sealed(asdict(description), indent=1)


def read_description(folder: Path) -> SourceDescription:
    """What stands beside the shards.

    Raises:
        DataError: another version of cpt made the folder.
        OSError, ValueError, TypeError: it is damaged, or not there yet.
    """
    return as_description((folder / DESCRIPTION).read_bytes(), folder)


def as_description(text: str | bytes, folder: Path | str) -> SourceDescription:
    """What a description says.

    Raises:
        DataError: another version of cpt made the folder.
        ValueError, TypeError: it is damaged.
    """
    content = json.loads(text)
    if content.get("format") != FORMAT:
        raise DataError(
            f"{folder}: made by another version of cpt (format {content.get('format', 1)}, ours is {FORMAT}); it is"
            " not read. Remove it: cpt store prune --leftovers."
        )
    content = unsealed(text)
    return SourceDescription(**{**content, "longest": tuple(content["longest"])})


def fetch_description(folder: Path) -> SourceDescription | None:
    """What a bucket says of a source; None where there is no bucket, or nothing of the source in it.

    Args:
        folder: of the source.

    Raises:
        DataError: it is damaged.
    """
    store, name = bucket(), manifest_of(folder)
    content = store.read(name) if store is not None else None
    if store is None or content is None:
        return None
    try:
        return as_description(content, store.url)
    except (ValueError, TypeError) as problem:
        raise store.damaged(name) from problem


def manifest_of(folder: Path) -> str:
    """Its name in a bucket."""
    return f"tokens/{folder.name}/{DESCRIPTION}"
