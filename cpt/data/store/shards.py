"""A shard: some pieces of a source, read, transformed, filtered and tokenised by one process, and kept as a small
token store."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128

from cpt.cache import publish_once
from cpt.data.filters.filters import ComponentLists, build_filters, build_transforms, sift
from cpt.data.readers.documents import (
    Document,
    Listed,
    OnBadRow,
    apply_policy,
    count_reasons,
    write_bad_rows,
)
from cpt.data.readers.sources import read_piece
from cpt.data.readers.values import score_column
from cpt.data.store.bucket import bucket
from cpt.data.store.plan import Shard
from cpt.data.store.token_files import ShardDescription, SourceDescription, TokenFiles, TokenWriter, is_sound_shard
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import DataError, UserCodeError
from cpt.plugins import find
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import DocumentSource, Source

BATCH_DOCUMENTS, BATCH_CHARACTERS = 1000, 4_000_000
SAMPLE_DOCUMENTS, SAMPLE_CHARACTERS = 200, 1_000_000


@dataclass(frozen=True)
class ShardWork:
    """What is done to each shard of a source; travels to worker processes."""

    source: DocumentSource
    key: str
    """Where the source stands in the recipe, for messages: `data.sources[0]`."""
    filters: ComponentLists
    transforms: ComponentLists
    encoder: DocumentEncoder
    on_bad_row: OnBadRow
    folder: Path
    enough_tokens: int | None = None
    """Of a source that comes one row after the other, maybe without end: after so many tokens the rest is not read."""
    prove_on_the_way: bool = False
    """The encoder is proven on the first documents that come, where a source cannot be looked into beforehand."""

    def __call__(self, shard: Shard, name: str) -> None:
        """Fetch or make the shard in a folder of that name, if it is not there yet."""

        def fill(folder: Path) -> None:
            if not fetch_shard(self, name, folder):
                fill_shard(self, shard, folder)

        publish_once(self.folder / name, fill, durable=False, is_sound=is_sound_shard)

    def accepts(self, stored: ShardDescription | SourceDescription) -> bool:
        """False where an earlier run skipped bad rows that are an error now."""
        return not stored.bad_rows or self.on_bad_row == "skip"


def fetch_shard(work: ShardWork, name: str, folder: Path) -> bool:
    """Whether the bucket, if there is one, had the shard; then its files are in `folder`."""
    store = bucket()
    if store is None or not store.get(work.folder, name, folder):
        return False
    if not is_sound_shard(folder):
        raise store.damaged(work.folder, name)
    if work.accepts(TokenFiles(folder).description):
        return True
    for path in folder.iterdir():
        path.unlink()
    return False


def fill_shard(work: ShardWork, shard: Shard, folder: Path) -> None:
    """Write the shard's documents, in order, to a token store in `folder`."""
    encoder, bad, dropped = work.encoder, list[Listed](), Counter[str]()
    score = scorer(work.source)
    writer = TokenWriter(folder, encoder.dtype, scored=score is not None, segmented=encoder.form != "document")
    text_digest, longest = xxh3_128(), ("", 0)
    rows = (item for piece in shard for item in read_piece(work.source, piece, work.key))
    documents = islice(apply_policy(rows, work.on_bad_row, work.key, bad), work.source.max_documents)
    for batch in batches(encodable(keep(documents, work, dropped), encoder, dropped)):
        texts = [text for text, _ in batch]
        if work.prove_on_the_way and not writer.num_documents:
            encoder = encoder.proven_for(texts[:SAMPLE_DOCUMENTS])
        ids, lengths, segments = encoder.encode_segments(texts)
        raw = [text.encode() for text in texts]
        hashes = np.fromiter(map(xxh3_64_intdigest, raw), np.uint64, len(raw))
        num_bytes = encoder.bytes_learned(texts, raw)
        text_digest.update(hashes.data)
        scores = None if score is None else np.array([score(text, document) for text, document in batch], np.float64)
        writer.append(ids, lengths, hashes, num_bytes, scores, segments if encoder.form != "document" else None)
        at = int(lengths.argmax())
        if lengths[at] > longest[1]:
            longest = batch[at][1].near, int(lengths[at])
        if work.enough_tokens is not None and writer.num_tokens >= work.enough_tokens:
            break
    if bad:
        write_bad_rows(bad, folder)
    writer.close(
        dropped,
        bad_rows=count_reasons(bad),
        longest=longest,
        engine=encoder.engine,
        texts=text_digest.hexdigest(),
    )


def scorer(source: DocumentSource) -> Callable[[str, Document], float] | None:
    """What tells a document's place in the order that the source asks for."""
    if not isinstance(source, Source) or source.order_by is None:
        return None
    function = None if score_column(source) else find("score", source.order_by, {})

    def score(text: str, document: Document) -> float:
        try:
            value = document.score if function is None else function(text)
        except UserCodeError as problem:
            raise UserCodeError(f"{document.where}: {problem}") from problem.__cause__
        if not isinstance(value, float | int) or math.isnan(value):
            raise DataError(f"{document.where}: `order_by: {source.order_by}` gives it {value!r}, expected a number.")
        return value

    return score


def keep(documents: Iterable[Document], work: ShardWork, dropped: Counter[str]) -> Iterator[tuple[str, Document]]:
    """The texts that transforms make and every filter lets pass, each with the document it comes from; others are
    counted by reason."""
    transforms, filters = build_transforms(work.transforms), build_filters(work.filters)
    name = reported_name(work.source)
    for document in documents:
        if transforms or filters:
            parts = sift(View(document, name), transforms, filters)
        else:  # the fast path
            parts = iter([(document.text, "empty" if not document.text or document.text.isspace() else None)])
        for text, reason in parts:
            if reason is None:
                yield text, document
            else:
                dropped[reason] += 1


def encodable(
    documents: Iterable[tuple[str, Document]], encoder: DocumentEncoder, dropped: Counter[str]
) -> Iterator[tuple[str, Document]]:
    """Without examples that the chat template refuses, which are counted by reason."""
    for text, document in documents:
        reason = encoder.reason_to_drop(text)
        if reason is None:
            yield text, document
        else:
            dropped[reason] += 1


@dataclass(frozen=True)
class View(Mapping[str, str]):
    """What filters see of a document; where it stands is worked out only for those that ask."""

    document: Document
    source: str

    def __getitem__(self, name: str) -> str:
        if name == "text":
            return self.document.text
        if name == "where":
            return self.document.where
        if name == "source":
            return self.source
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(("text", "source", "where"))

    def __len__(self) -> int:
        return 3


def batches(documents: Iterator[tuple[str, Document]]) -> Iterator[list[tuple[str, Document]]]:
    """Groups large enough to keep an encoder busy, small enough for the memory."""
    for first in documents:
        batch, characters = [first], len(first[0])
        while (
            characters < BATCH_CHARACTERS
            and len(batch) < BATCH_DOCUMENTS
            and (document := next(documents, None)) is not None
        ):
            batch.append(document)
            characters += len(document[0])
        yield batch


def sample(source: DocumentSource, shards: Sequence[Shard], key: str) -> list[str]:
    """Documents to prove an encoder on: the source's first ones, and some from its middle and its end."""
    texts: list[str] = []
    spread = [shards[0], *(shards[len(shards) * quarter // 4] for quarter in (1, 2, 3)), shards[-1]]
    for shard, wanted in zip(spread, (SAMPLE_DOCUMENTS // 2, *[SAMPLE_DOCUMENTS // 8] * 4), strict=True):
        rows = (item for piece in shard for item in read_piece(source, piece, key))
        some = [item.text[:SAMPLE_CHARACTERS] for item in islice(rows, wanted) if isinstance(item, Document)]
        budget = SAMPLE_CHARACTERS * wanted // SAMPLE_DOCUMENTS
        for text in some:
            texts.append(text[:budget])
            budget -= len(text)
            if budget <= 0:
                break
    return texts
