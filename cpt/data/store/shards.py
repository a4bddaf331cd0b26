"""Cut a source into shards and chunks, and make a shard in one process: read, transform, filter, tokenise.

The names and sizes of the files alone decide the cut. A small source is one chunk. A large one is read chunk by
chunk, in an order drawn from the seed: training starts when the first, small, chunk is ready."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from operator import itemgetter
from os.path import commonpath
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128

from cpt.cache import key_of, publish_once
from cpt.data.readers.account import NOT_LEARNED, Losses
from cpt.data.readers.documents import (
    Document,
    File,
    OnBadRow,
    Piece,
    count_reasons,
    documents_of,
    write_bad_rows,
)
from cpt.data.readers.filters import Sieve, sift
from cpt.data.readers.sources import absolute, pieces_of, read_piece
from cpt.data.store.file_states import OtherPlace, hash_of_pieces, stored_description
from cpt.data.store.text_loss import (
    FIRST_EXCERPTS,
    SpelledTokens,
    TextLoss,
    excerpts,
    total_loss,
)
from cpt.data.store.token_files import (
    DESCRIPTION,
    Hashes,
    ShardDescription,
    SourceDescription,
    TokenFiles,
    TokenWriter,
    as_text,
    bucket,
    is_intact_shard,
)
from cpt.data.store.tokenization import DocumentEncoder
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import DocumentSource

Shard = list[Piece]
Origin = TypeVar("Origin")  # of a text: its document, or what a caller needs of it
SHARD_BYTES = 16 * 2**20  # of files: little is lost when killed, and opening files is cheap
HELD_OUT_SHARDS = 8  # in a source with chunks: read before the first step
BATCH_DOCUMENTS = 1000
BATCH_CHARACTERS = 4_000_000
SAMPLE_DOCUMENTS = 200
SAMPLE_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class Plan:
    shards: list[Shard]  # in the order of the source's documents
    num_bytes: list[int]  # approximate size of each shard's files or parts of files; 0 if unknown
    chunks: list[list[int]]  # numbers of the shards of each chunk, in training order
    held_out: list[int]  # shards with the held-out set; the same for every seed

    @property
    def is_whole(self) -> bool:
        return len(self.chunks) == 1

    @cached_property
    def bytes_of_chunks(self) -> list[int]:
        chunk_bytes = []
        for chunk in self.chunks:
            chunk_bytes.append(sum(self.num_bytes[shard] for shard in chunk))
        return chunk_bytes

    @property
    def numbers(self) -> range:
        return range(len(self.shards))

    def scale_from(self, chunks: int) -> float:
        """The factor from the first chunks to the whole source, by bytes."""
        return sum(self.bytes_of_chunks) / max(1, sum(self.bytes_of_chunks[:chunks]))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the cut and of the file names relative to their common folder, which may move."""
        paths = {piece.path for shard in self.shards for piece in shard}
        root = commonpath(paths) if len(paths) > 1 else str(Path(next(iter(paths))).parent)

        def cut(piece: Piece) -> list[Any]:
            return [piece.path.removeprefix(root), piece.start, piece.stop]

        cuts = [list(map(cut, shard)) for shard in self.shards]
        # "ordered" was for sources sorted by a score; without it, runs of earlier versions would not resume.
        return key_of(
            {"shards": cuts, "bytes": self.num_bytes, "chunks": self.chunks, "ordered": False}
        )


def plan_of(
    source: DocumentSource, key: str, states: Sequence[File], *, chunk_bytes: int, seed: int
) -> Plan:
    """Cut a source into shards and chunks.

    Args:
        states: files of the source; empty for a stream of rows of unknown size, which is one shard.
        chunk_bytes: size of files above which there are several chunks.
    """
    shard_bytes = min(SHARD_BYTES, chunk_bytes)
    file_sizes = {file.name: file.size for file in states}
    # `max_documents` counts from the first one.
    is_one_shard = not states or source.max_documents is not None
    shards: list[Shard] = []
    num_bytes: list[int] = []
    for piece in pieces_of(source, key, shard_bytes):
        stop = file_sizes.get(absolute(piece.path), 0) if piece.stop is None else piece.stop
        piece_bytes = max(0, stop - piece.start)
        is_full = bool(shards) and not is_one_shard and num_bytes[-1] + piece_bytes > shard_bytes
        if is_full or not shards:  # small files share a shard
            shards.append([])
            num_bytes.append(0)
        shards[-1].append(piece)
        num_bytes[-1] += piece_bytes
    numbers = list(range(len(shards)))
    if sum(num_bytes) <= chunk_bytes:
        return Plan(shards, num_bytes, chunks=[numbers], held_out=numbers)
    order = np.random.default_rng(seed_of(seed, "windows")).permutation(len(shards)).tolist()
    held_out = np.random.default_rng(0).permutation(len(shards))[:HELD_OUT_SHARDS].tolist()
    chunks = group_into_chunks(order, num_bytes, shard_bytes, chunk_bytes)
    return Plan(shards, num_bytes, chunks, sorted(held_out))


def group_into_chunks(
    order: Sequence[int], num_bytes: Sequence[int], first_bytes: int, chunk_bytes: int
) -> list[list[int]]:
    """Group shards in the given order: the first two chunks of one shard, then twice as much each time."""
    chunks: list[list[int]] = [[]]
    full_bytes = first_bytes
    free_bytes = first_bytes
    for shard in order:
        if chunks[-1] and free_bytes < num_bytes[shard]:
            if len(chunks) > 1:
                full_bytes = min(2 * full_bytes, chunk_bytes)
            chunks.append([])
            free_bytes = full_bytes
        chunks[-1].append(shard)
        free_bytes -= num_bytes[shard]
    return chunks


@dataclass(frozen=True)
class ShardWork:
    """The work to make any shard of a source; sent to worker processes."""

    source: DocumentSource
    key: str  # the source's key in messages: `data.sources[0]`
    sieve: Sieve
    encoder: DocumentEncoder
    on_bad_row: OnBadRow
    folder: Path
    enough_tokens: int | None = None  # stop reading a stream here, as it may be endless
    prove_on_the_way: bool = False  # verify the encoder on a stream's first documents
    held_out_share: float = 0.0  # of the documents, by hash: they are decoded and compared whole

    def __call__(self, shard: Shard, name: str, other_place: OtherPlace | None = None) -> None:
        """Fetch or make the shard in a folder of that name, unless it exists.

        `other_place`: where the same shard may be, if the files have moved.
        """

        def fill(folder: Path) -> None:
            store = bucket()
            if store is not None and store.get(self.folder / name, folder):
                if not is_intact_shard(folder):
                    raise store.damaged(self.folder / name)
                if self.accepts(TokenFiles(folder).description):
                    return
                for path in folder.iterdir():
                    path.unlink()
            if other_place is None or not link_shard(self, shard, other_place, folder):
                fill_shard(self, shard, folder)

        publish_once(self.folder / name, fill, durable=False, is_intact=is_intact_shard)

    def accepts(self, stored: ShardDescription | SourceDescription) -> bool:
        """False if an earlier run skipped bad rows that are an error now."""
        return not stored.bad_rows or self.on_bad_row == "skip"


def link_shard(work: ShardWork, shard: Shard, there: OtherPlace, folder: Path) -> bool:
    """Link the arrays of a shard that was made from the same bytes in another folder; False if it cannot be used."""
    stored = stored_description(there.folder)
    if stored is None or stored.bad_rows:  # those list their places
        return False
    if stored.contents is None or stored.contents != hash_of_pieces(shard):
        return False
    if not is_intact_shard(there.folder):
        return False
    for path in there.folder.glob("*.bin"):
        os.link(path, folder / path.name)
    where, num_tokens = stored.longest
    stored = replace(
        stored,
        longest=(there.where_here(where), num_tokens),
        spelled_at=there.where_here(stored.spelled_at),
    )
    (folder / DESCRIPTION).write_text(as_text(stored))
    return True


def fill_shard(work: ShardWork, shard: Shard, folder: Path) -> None:
    encoder = work.encoder
    losses = Losses()
    is_segmented = encoder.form != "document"  # a chat as a document is learned completely
    writer = TokenWriter(folder, encoder.dtype, segmented=is_segmented)
    text_digest = xxh3_128()
    longest = ("", 0)
    checks = TextChecks(encoder, work.held_out_share)
    for batch in batches(texts_of(work, shard, losses, encoder)):
        texts: list[str] = list(map(itemgetter(0), batch))
        documents: list[Document] = list(map(itemgetter(1), batch))
        if work.prove_on_the_way and not writer.num_documents:
            encoder = checks.encoder = encoder.proven_for(texts[:SAMPLE_DOCUMENTS])
        ids, lengths, segments = encoder.encode_segments(texts)
        raw = list(map(str.encode, texts))
        hashes = np.fromiter(map(xxh3_64_intdigest, raw), np.uint64, len(raw))
        text_digest.update(hashes.data)
        checks.add(texts, raw, hashes, documents)
        num_bytes = encoder.bytes_learned(texts, raw)
        writer.append(ids, lengths, hashes, num_bytes, segments if is_segmented else None)
        not_learned = sum(map(len, raw)) - int(num_bytes.sum())
        if not_learned:
            losses.num_bytes[NOT_LEARNED] += not_learned
        index = int(lengths.argmax())
        if lengths[index] > longest[1]:
            longest = (where_of(documents[index]), int(lengths[index]))
        if work.enough_tokens is not None and writer.num_tokens >= work.enough_tokens:
            break
    if losses.bad_rows:
        write_bad_rows(losses.bad_rows, folder)
    writer.close(
        dropped=dict(losses.documents),
        dropped_bytes=dict(losses.num_bytes),
        bad_rows=count_reasons(losses.bad_rows),
        longest=longest,
        engine=encoder.engine,
        texts=text_digest.hexdigest(),
        text_loss=checks.compare(),
        spelled=dict(checks.spelled.counts),
        spelled_at=checks.spelled_at,
        contents=hash_of_pieces(shard),
    )


def where_of(document: Document) -> str:
    return document.origin.where(document.number, exact=False)


class TextChecks:
    """Checks of the texts of a shard: what the tokenizer loses, and special tokens that are spelled in them."""

    def __init__(
        self,
        encoder: DocumentEncoder,
        held_out_share: float,
        first_excerpts: int = FIRST_EXCERPTS,
    ) -> None:
        self.encoder = encoder
        self.held_out_share = held_out_share
        self.first_excerpts = first_excerpts
        self.collected = list[str]()
        self.text_loss: TextLoss | None = None
        self.spelled = SpelledTokens(encoder.control_tokens)
        self.spelled_at = ""

    def add(
        self,
        texts: Sequence[str],
        raw: Sequence[bytes],
        hashes: Hashes,
        documents: Sequence[Document],
    ) -> None:
        """Collect texts that may be held out whole, and excerpts of the others."""
        is_first = self.text_loss is None and not self.collected
        at_least = self.first_excerpts if is_first else 1
        may_be_held_out = hashes <= np.float64(self.held_out_share * 2**64)
        held_out_texts = [texts[number] for number in np.flatnonzero(may_be_held_out).tolist()]
        trained_texts = [texts[number] for number in np.flatnonzero(~may_be_held_out).tolist()]
        self.collected += self.encoder.texts_read(held_out_texts)
        self.collected += excerpts(self.encoder.texts_read(trained_texts), at_least)
        if sum(map(len, self.collected)) >= BATCH_CHARACTERS:
            self.compare()
        first = self.spelled.count(raw)
        if first is not None and not self.spelled_at:
            self.spelled_at = where_of(documents[first])

    def compare(self) -> TextLoss | None:
        """Compare what was collected; one large batch takes half the time of many small ones."""
        if self.collected:
            self.text_loss = total_loss([self.text_loss, self.encoder.text_loss(self.collected)])
            self.collected = []
        return self.text_loss


def texts_of(
    work: ShardWork,
    pieces: Sequence[Piece],
    losses: Losses | None = None,
    encoder: DocumentEncoder | None = None,
) -> Iterator[tuple[str, Document]]:
    """Yield the transformed texts that filters and the encoder's chat template accept, each with its document. All
    others are counted in `losses`."""
    if losses is None:
        losses = Losses()
    name = reported_name(work.source)
    transforms, filters = work.sieve.functions()
    skip = partial(losses.drop_row, key=work.key) if work.on_bad_row == "skip" else None
    rows = chain.from_iterable(read_piece(work.source, piece, work.key) for piece in pieces)
    documents = documents_of(rows, work.key, skip)
    for document in islice(documents, work.source.max_documents):
        texts = list(sift(document, name, transforms, filters))
        if transforms:
            losses.count_transformed(document.text, [text for text, _ in texts])
        for text, reason in texts:
            if reason is None and encoder is not None:
                reason = encoder.reason_to_drop(text)
            if reason is None:
                yield text, document
            else:
                losses.drop(text, reason)


def batches(texts: Iterator[tuple[str, Origin]]) -> Iterator[list[tuple[str, Origin]]]:
    """Group texts into batches: large enough for the encoder, small enough for memory."""
    batch: list[tuple[str, Origin]] = []
    characters = 0
    for text, origin in texts:
        batch.append((text, origin))
        characters += len(text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def sample(source: DocumentSource, shards: Sequence[Shard], key: str) -> list[str]:
    """A sample to verify an encoder on: the source's first documents, and some from its middle and its end."""
    texts = sample_shard(source, shards[0], key, SAMPLE_DOCUMENTS // 2)
    last = len(shards) - 1
    for number in (len(shards) // 4, len(shards) // 2, len(shards) * 3 // 4, last):
        texts += sample_shard(source, shards[number], key, SAMPLE_DOCUMENTS // 8)
    return texts


def sample_shard(source: DocumentSource, shard: Shard, key: str, num_documents: int) -> list[str]:
    texts = []
    rows = chain.from_iterable(read_piece(source, piece, key) for piece in shard)
    characters = SAMPLE_CHARACTERS * num_documents // SAMPLE_DOCUMENTS
    for row in islice(rows, min(num_documents, source.max_documents or num_documents)):
        if isinstance(row, Document) and characters > 0:
            texts.append(row.text[:characters])
            characters -= len(row.text)
    return texts


def seed_of(*parts: object) -> int:
    """A 32-bit seed from the parts."""
    return xxh3_64_intdigest(" ".join(map(str, parts)).encode()) % 2**32
