"""What runs read: their data by source and file, their tokenizers and weights, told apart by content and not by
path."""

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from cpt.compare.record import Record
from cpt.compare.rows import Row, Topic, differing
from cpt.evaluation.kept_losses import DocumentLosses
from cpt.recipe.tree import Location
from cpt.runs.folder import Content

MOST_FILES = 20
HASH_SHOWN = 12
NOT_THERE = "not there"
COUNTS = ("documents", "held_out", "tokens")


def data_topic(records: Sequence[Record], recipes_differ: bool) -> Topic:
    """The files that differ, by source; counts only where neither files, tokenizers nor recipes explain them.

    Args:
        recipes_differ: in something that decides which documents are read.
    """
    rows = [row for source in common_sources(records) for row in file_rows(records, source) if row.differs]
    if not rows and not recipes_differ and same_tokenizers(records):
        rows = [row for source in common_sources(records) for row in count_rows(records, source) if row.differs]
        rows = rows or [Row("fingerprint", tuple(text_at(record.inputs, "data", "fingerprint") for record in records))]
    return differing("Data", rows)


def model_topic(records: Sequence[Record]) -> Topic:
    """Tokenizer and input weights."""
    files = dict.fromkeys(name for record in records for name in weights_of(record))
    rows = [Row("tokenizer", tuple(shortened(text_at(record.inputs, "tokenizer", "xxh3")) for record in records))]
    rows += [Row("type of the weights", tuple(text_at(record.inputs, "weights", "dtype") for record in records))]
    if not all(
        set(weights_of(record).values()) == set(weights_of(records[0]).values())
        for record in records
        if weights_of(record)
    ):
        rows += [
            Row(f"weights {name}", tuple(hash_of_file(weights_of(record), name) for record in records))
            for name in files
        ]
    return differing("Tokenizer and weights", rows)


def same_tokenizers(records: Sequence[Record]) -> bool:
    """None is known to differ from the others."""
    return not Row("", tuple(text_at(record.inputs, "tokenizer", "xxh3") for record in records)).differs


def same_anyway(records: Sequence[Record]) -> set[Location]:
    """Keys of the recipe that name files, where all runs are known to have read the same content there."""
    same: set[Location] = set()
    names = [tokenizer_and_weights(record) for record in records]
    if names[0][1] and all(one == names[0] for one in names):
        same.add(("model", "path"))
    if names[0][0] and all(one[0] == names[0][0] for one in names):
        same.add(("tokenizer", "path"))
    for index, (source, *_) in enumerate(zip(*(sources_of(record) for record in records), strict=False)):
        files = [sorted(files_of(record, name).values()) for record in records if (name := nth_source(record, index))]
        if len(files) == len(records) and files[0] and all(one == files[0] for one in files):
            same |= {("data", "sources", index, "path"), ("data", "sources", f"[{source}]", "path")}
    for name in records[0].losses:
        if all(
            name in record.losses and is_same_set(record.losses[name], records[0].losses[name]) for record in records
        ):
            same.add(("evaluation", "perplexity", f"[{name}]", "path"))
    return same


def is_same_set(losses: DocumentLosses, others: DocumentLosses) -> bool:
    """Both are of the same documents in the same order."""
    return losses.hashes.shape == others.hashes.shape and bool((losses.hashes == others.hashes).all())


def tokenizer_and_weights(record: Record) -> tuple[str | None, list[str]]:
    """Their hashes."""
    return text_at(record.inputs, "tokenizer", "xxh3"), sorted(weights_of(record).values())


def file_rows(records: Sequence[Record], source: str) -> Iterator[Row]:
    """A row for each file of a source that is not the same in all runs which have the source."""
    files = [short_paths(files_of(record, source)) if source in sources_of(record) else None for record in records]
    there = [one for one in files if one is not None]
    if len({tuple(sorted(one.values())) for one in there}) < 2:
        return  # the same contents, whatever the files are called
    names = [
        name for name in sorted({name for one in there for name in one}) if len({one.get(name) for one in there}) > 1
    ]
    for name in names[:MOST_FILES]:
        yield Row(f"{source}: {name}", tuple(None if one is None else hash_of_file(one, name) for one in files))
    if len(names) > MOST_FILES:
        counts = [None if one is None else f"{len(one):,} files" for one in files]
        left = len(names) - MOST_FILES
        yield Row(
            f"{source}: {left:,} more files differ",
            (*counts[:1], *(f"{count} (differ)" if count else None for count in counts[1:])),
        )


def count_rows(records: Sequence[Record], source: str) -> Iterator[Row]:
    """What became of the same files."""
    for what in COUNTS:
        counts = [at(record.inputs, "data", "sources", source, what) for record in records]
        yield Row(f"{source}: {what}", tuple(f"{count:,}" if isinstance(count, int) else None for count in counts))


def common_sources(records: Sequence[Record]) -> list[str]:
    """Sources that two runs or more have; the recipes tell of the others."""
    names = [name for record in records for name in sources_of(record)]
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


def sources_of(record: Record) -> Content:
    """By name."""
    sources = at(record.inputs, "data", "sources")
    return sources if isinstance(sources, dict) else {}


def nth_source(record: Record, index: int) -> str | None:
    """Its name."""
    names = list(sources_of(record))
    return names[index] if index < len(names) else None


def files_of(record: Record, source: str) -> dict[str, str]:
    """Path -> hash."""
    return texts(at(record.inputs, "data", "sources", source, "files"))


def weights_of(record: Record) -> dict[str, str]:
    """File -> hash of the weights that the run began with."""
    return texts(at(record.inputs, "weights", "sha256"))


def short_paths(files: dict[str, str]) -> dict[str, str]:
    """With each path as short as it can be told from the others of its source."""
    paths = [PurePath(path).parts for path in files]
    length = 1
    while len({path[-length:] for path in paths}) < len(paths):
        length += 1
    return {"/".join(path[-length:]): value for path, value in zip(paths, files.values(), strict=True)}


def hash_of_file(files: dict[str, str], name: str) -> str | None:
    """As a table shows it; None where nothing is known of any file."""
    return None if not files else shortened(files[name]) if name in files else NOT_THERE


def shortened(text: str | None) -> str | None:
    """The beginning of a hash, which tells two apart."""
    return None if text is None else text[:HASH_SHOWN]


def texts(content: Any) -> dict[str, str]:
    """What is text of a mapping."""
    return (
        {str(key): value for key, value in content.items() if isinstance(value, str)}
        if isinstance(content, dict)
        else {}
    )


def text_at(content: Any, *keys: str) -> str | None:
    """A text, None where there is none."""
    found = at(content, *keys)
    return found if isinstance(found, str) else None


def at(content: Any, *keys: str) -> Any:
    """What stands under these keys, one inside the other; None where the way ends before."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content
