"""A prepared store of any number of tokens, as far as an index sees it: everything but what the tokens say.

The sources' files are there with their names and sizes, and hold nothing (they are sparse). How they are cut into
shards and chunks is what cpt itself works out of them. A few shards are drawn, with the lengths of documents that
such text has, and a few chunks of them are packed by cpt's own packing; all others are links to these, under the
names that cpt looks for. So each row of each chunk can be asked for.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cpt.cache import key_of
from cpt.data.rows.chunks import START, ChunkedRows, ChunkEntry, by_power_of_two, write_total
from cpt.data.rows.mixture import MixtureRows
from cpt.data.rows.open_sources import open_source
from cpt.data.rows.packing import Layout
from cpt.data.rows.selection import Selection
from cpt.data.store.token_files import (
    DESCRIPTION,
    SourceDescription,
    StoredDocuments,
    TokenFiles,
    TokenWriter,
    as_text,
)
from cpt.data.store.tokenization import DocumentEncoder
from cpt.data.store.tokenized import TokenizedSource
from cpt.errors import DataError
from cpt.files import sealed
from cpt.recipe.schema import Budget, Data, Evaluation, Source

SEED, SEQUENCE_LENGTH = 1, 4096
FILE_BYTES = 2**30
TEMPLATES = 3  # chunks of each source that are drawn
VOCABULARY = 100_000  # so that ids take four bytes


@dataclass(frozen=True)
class Kind:
    """A kind of text."""

    share: float
    """Of all tokens."""
    median_tokens: float
    spread: float
    """Of the logarithm of a document's tokens."""
    bytes_per_token: float


KINDS = {
    "web": Kind(0.70, 420, 0.95, 4.4),
    "code": Kind(0.15, 600, 1.3, 3.4),
    "papers": Kind(0.10, 6_000, 0.8, 4.2),
    "books": Kind(0.05, 90_000, 0.7, 4.4),
}


def tokenizer() -> PreTrainedTokenizerBase:
    """One of so many entries, none of which is asked for."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [
        *letters,
        *(f"{letters[number % 256]}{number}" for number in range(VOCABULARY - len(letters))),
    ]
    backend = Tokenizer(
        models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[])
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=words[-1])


def data_of(folder: Path) -> Data:
    """The recipe's section."""
    sources = [
        Source(path=str(folder / "text" / name), name=name, weight=kind.share)
        for name, kind in KINDS.items()
    ]
    return Data(sources=sources, sequence_length=SEQUENCE_LENGTH)


def budget_of(tokens: int) -> Budget:
    """All tokens once, as far as shares allow."""
    return Budget(
        tokens=int(0.98 * tokens),
        global_batch_tokens=min(4_194_304, tokens // 1000 // SEQUENCE_LENGTH * SEQUENCE_LENGTH),
    )


def make_store(folder: Path, tokens: int) -> None:
    """Text files, and a store in which all of them are prepared."""
    for name, kind in KINDS.items():
        make_files(folder / "text" / name, round(tokens * kind.share * kind.bytes_per_token))
    data, encoder = data_of(folder), DocumentEncoder(tokenizer())
    for number, kind in enumerate(KINDS.values()):
        source = open_source(
            data, data.sources[number], f"data.sources[{number}]", encoder, folder / "cache", SEED
        )
        fill_source(source, kind, folder, encoder)


def make_files(folder: Path, num_bytes: int) -> None:
    """Files that say nothing, a thousand a folder."""
    for number, size in enumerate(sizes(num_bytes)):
        path = folder / f"{number // 1000:03}" / f"part-{number:06}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(size)


def sizes(num_bytes: int) -> Iterator[int]:
    """Of each file."""
    while num_bytes > 0:
        yield min(FILE_BYTES, num_bytes)
        num_bytes -= FILE_BYTES


def fill_source(
    source: TokenizedSource, kind: Kind, folder: Path, encoder: DocumentEncoder
) -> None:
    """Shards, chunks and what lists them."""
    layout = Layout(SEQUENCE_LENGTH, "best_fit", None, encoder.pad)
    rows = ChunkedRows(
        source, Selection(None, np.empty(0, np.uint64), None, None), layout, SEED, folder / "cache"
    )
    draw = Templates(folder / "templates" / source.folder.name, kind, encoder, layout)
    entries, shards, documents = list[ChunkEntry](), dict[int, tuple[str, str]](), 0
    for chunk, numbers in enumerate(source.plan.chunks):
        template = chunk % TEMPLATES
        for place, number in enumerate(numbers):
            target = draw.shard(template, place)
            source.shard_folder(number).symlink_to(target)
            shards[number] = (source.shard_folder(number).name, key_of({"shard": number}))
        packed, known = draw.chunk(template, len(numbers))
        rows.chunk_folder(chunk).symlink_to(packed)
        before = entries[-1] if entries else START
        digest = key_of({"before": before.digest, "own": known.own_digest})
        entries.append(
            replace(
                known,
                first_row=before.end,
                tokens_before=before.tokens_before + before.tokens,
                digest=digest,
            )
        )
        rows.entry_file(chunk).write_text(sealed(asdict(entries[-1])))
        documents += known.documents
    write_total(rows.folder, len(entries) - 1, entries)
    last = entries[-1]
    files = {name: key_of({"file": name}) for name, _, _ in source.states}
    listed = dict(shards[number] for number in range(len(source.plan.shards)))
    made_from = {"source": source.work.source.path, "tokenizer": encoder.name, "engine": "none"}
    description = SourceDescription(
        source.name,
        documents,
        last.tokens_before + last.tokens,
        listed,
        {},
        {},
        last.longest,
        files,
        made_from,
    )
    (source.folder / DESCRIPTION).write_text(as_text(description))


class Templates:
    """The shards of a kind of text that are drawn, and chunks of them."""

    def __init__(self, folder: Path, kind: Kind, encoder: DocumentEncoder, layout: Layout) -> None:
        self.folder, self.kind, self.encoder, self.layout = folder, kind, encoder, layout
        self.chunk = lru_cache(None)(self._chunk)

    def shard(self, template: int, place: int) -> Path:
        """A shard of 16 MiB of text."""
        folder = self.folder / f"shard-{template}-{place}"
        if not folder.exists():
            folder.mkdir(parents=True)
            lengths = lengths_of(self.kind, np.random.default_rng([template, place]))
            write_shard(folder, lengths, self.kind, self.encoder.dtype)
        return folder

    def _chunk(self, template: int, size: int) -> tuple[Path, ChunkEntry]:
        """A chunk of so many shards, packed, and what is known of it but for its place."""
        documents = StoredDocuments(
            [TokenFiles(self.shard(template, place)) for place in range(size)]
        )
        starts, lengths = documents.offsets[:-1], np.diff(documents.offsets)
        folder = self.folder / f"window-{template}-{size}"
        folder.mkdir()
        self.layout.packer(starts, lengths, SEED)(folder)
        packing, tokens = self.layout.open(documents, folder).packing, int(lengths.sum())
        own = key_of({"template": template, "size": size, "kind": self.folder.name})
        longest = max(
            (part.description.longest for part in documents.parts), key=lambda place: place[1]
        )
        return folder, replace(
            START,
            rows=packing.num_rows,
            tokens=tokens,
            tokens_in_rows=tokens,
            positions=packing.num_rows * SEQUENCE_LENGTH,
            documents=len(starts),
            lengths=by_power_of_two(lengths),
            longest=longest,
            own_digest=own,
        )


def lengths_of(kind: Kind, draw: np.random.Generator) -> np.ndarray:
    """Tokens of the documents of a shard."""
    wanted = round(16 * 2**20 / kind.bytes_per_token)
    mean = kind.median_tokens * np.exp(kind.spread**2 / 2)
    lengths = np.maximum(
        8,
        draw.lognormal(
            np.log(kind.median_tokens), kind.spread, 64 + round(2 * wanted / mean)
        ).astype(np.int64),
    )
    return lengths[: max(1, int(np.searchsorted(lengths.cumsum(), wanted)))]


def write_shard(folder: Path, lengths: np.ndarray, kind: Kind, dtype: np.dtype) -> None:
    """By cpt's own writer, but for the tokens, of which there are as many and none is written."""
    writer = TokenWriter(folder, dtype)
    draw = np.random.default_rng(len(lengths))
    hashes = draw.integers(0, 2**63, len(lengths), np.uint64)
    writer.append(
        np.empty(0, dtype), lengths, hashes, (lengths * kind.bytes_per_token).astype(np.int64)
    )
    writer.num_tokens = int(lengths.sum())
    longest = "part-000000.jsonl:1", int(lengths.max())
    writer.close(dropped={}, bad_rows={}, longest=longest, engine="none", texts="")
    with (folder / "tokens.bin").open("r+b") as file:
        file.truncate(writer.num_tokens * dtype.itemsize)
    if TokenFiles(folder).description.documents != len(lengths):
        raise DataError(f"{folder}: not as it was drawn")


def realised_shares(rows: MixtureRows, chunked: list[ChunkedRows], number: int) -> list[float]:
    """Each source's share of the tokens in the first `number` rows, from what is in each chunk; in a chunk as in all
    of it."""
    tokens = []
    for source, count in zip(chunked, rows.counts(number), strict=True):
        assert source.total is not None
        entries = [source.entry(chunk) for chunk in range(source.total.chunks)]
        first_row = np.array([entry.first_row for entry in entries])
        num_rows = np.array([entry.rows for entry in entries])
        in_rows = np.array([entry.tokens_in_rows for entry in entries])
        inside = np.clip(count % source.total.rows - first_row, 0, num_rows) / num_rows
        tokens.append(count // source.total.rows * in_rows.sum() + (inside * in_rows).sum())
    return [float(one / sum(tokens)) for one in tokens]


def evaluation() -> Evaluation:
    """None: what is held out would have to be read."""
    return Evaluation()
