"""Select the documents of a source to train on, without duplicates and held-out documents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from cpt.cache import hold, key_of, open_array, publish_derived
from cpt.data.readers.comparing import COMPARISON, FIRST_COMPARISON, comparable
from cpt.data.store.token_files import (
    Hashes,
    Int64,
    Mask,
    ShardDescription,
    StoredDocuments,
    TokenFiles,
)
from cpt.data.store.tokenization import DocumentEncoder
from cpt.data.store.tokenized import TokenizedSource
from cpt.errors import ResourceError, install_line

FORMAT = 2  # version of a stored comparison; incremented when the method changes
FORMAT_OF_NEAR = 3
# As in FineWeb (arxiv.org/abs/2406.17557, section 3.4): 14 bands of 8 find 77 % of pairs with similarity 0.75.
SHINGLE = 5  # tokens
BANDS = 14
ROWS = 8  # in a band
# minimum share of common shingles (Jaccard similarity, estimated from the 112 hashes) of near duplicates
LIKENESS = 0.75
CHUNK_TOKENS = 4_000_000
FILES = {"exact duplicate": "is_equal.npy", "near duplicate": "is_near.npy"}  # reason -> file
# a reason for skipping documents: all later ones are skipped, too
AFTER_MAX_TOKENS = "after max_tokens"
# A longer document is never held out: it would dominate the held-out bytes and the verdict's confidence interval.
# With fewer than 20 documents to hold out, a fifth of their bytes is little more than an average document, so four
# average documents are allowed.
LARGEST_PART = 1 / 5
LARGEST_OF_AVERAGE = 4


class Repeated:
    """The documents of a source that repeat an earlier one, by reason; memory-mapped. `first_documents`: the number of
    each shard's first document among all compared documents, and the total."""

    def __init__(self, folder: Path, first_documents: Sequence[int]) -> None:
        self.folder = folder
        self.first_documents = list(first_documents)
        hold(folder, self)
        self._masks = {}
        for reason, file in FILES.items():
            if (folder / file).exists():
                self._masks[reason] = open_array(folder / file)

    def __reduce__(self) -> tuple[type["Repeated"], tuple[Path, list[int]]]:
        return Repeated, (self.folder, self.first_documents)

    @property
    def name(self) -> str:
        """A hash of the compared documents, the method, and the source's position."""
        return f"{self.folder.name} {self.first_documents[0]}"

    def of_shards(self, shards: Sequence[int]) -> dict[str, Mask]:
        """Masks for the documents of some shards, concatenated; at most one reason per document."""
        ranges = []
        for shard in shards:
            begin, end = self.first_documents[shard : shard + 2]
            ranges.append(slice(begin, end))
        masks = {}
        for reason, mask in self._masks.items():
            masks[reason] = np.concatenate([mask[documents] for documents in ranges])
        return masks


def repeated_documents(
    sources: Sequence[TokenizedSource],
    deduplicate: str,
    cache_dir: Path,
    comparison: int = COMPARISON,
) -> list[Repeated]:
    """Find the repeated documents of each source; computed once and stored in `cache_dir`. Sources are also compared
    with each other: of equal documents, the one of the first source is kept. Near duplicates are compared by the
    tokens of their `comparable` text, in the first `comparison` by those of the text itself."""
    is_near = deduplicate == "near"
    is_by_text = is_near and comparison != FIRST_COMPARISON

    def parts_of(source: TokenizedSource, *, verified: bool) -> list[TokenFiles]:
        return source.documents(source.plan.numbers, verified=verified).parts

    def fill(folder: Path) -> None:
        parts: list[TokenFiles] = []
        encoders: list[DocumentEncoder] = []
        for source in sources:
            parts += parts_of(source, verified=True)
            if is_by_text:
                encoders += [source.proven_work.encoder] * len(source.plan.shards)
        # A collision among the hashes of 10^8 texts has a probability of 0.03 %.
        hashes = np.concatenate([part.hashes for part in parts])
        _, first_documents = np.unique(hashes, return_index=True)
        is_equal = np.ones(len(hashes), bool)
        is_equal[first_documents] = False
        np.save(folder / FILES["exact duplicate"], is_equal)
        if is_near:
            is_like = near_duplicates(parts, folder, encoders)
            np.save(folder / FILES["near duplicate"], is_like & ~is_equal)

    shards: list[ShardDescription] = []  # of all sources
    first_shards = [0]  # of each source
    for source in sources:
        shards += [part.description for part in parts_of(source, verified=False)]
        first_shards.append(len(shards))
    content = {
        "format": FORMAT_OF_NEAR if is_by_text else FORMAT,
        "parts": [shard.digest for shard in shards],
        "numbers": [SHINGLE, BANDS, ROWS, LIKENESS] if is_near else [],
    }
    folder = publish_derived(cache_dir / "duplicates" / key_of(content), fill)
    first_documents = [0, *accumulate(shard.documents for shard in shards)]
    repeated = []
    for first, after in pairwise(first_shards):
        repeated.append(Repeated(folder, first_documents[first : after + 1]))
    return repeated


def near_duplicates(
    parts: Sequence[TokenFiles], folder: Path, encoders: Sequence[DocumentEncoder] = ()
) -> Mask:
    """True for documents similar to an earlier one (MinHash, doi.org/10.1109/SEQUEN.1997.666900), dropped or not. A
    document is compared with the first one with equal hashes in one of the `BANDS` groups. The hashes are in a
    temporary file, 448 bytes per document; memory is about 100 bytes per document (estimated)."""
    file = folder / "hashes.bin"
    num_documents = sum(part.description.documents for part in parts)
    hashes = np.memmap(file, np.uint32, "w+", shape=(num_documents, BANDS * ROWS))
    end = 0
    for part, encoder in zip_longest(parts, encoders):
        for batch in minhashes(part, encoder):
            begin = end
            end += len(batch)
            hashes[begin:end] = batch
    is_like = np.zeros(num_documents, bool)
    for band in range(BANDS):
        band_hashes = np.ascontiguousarray(hashes[:, band * ROWS : (band + 1) * ROWS])
        keys = band_hashes.view(f"V{ROWS * 4}").ravel()
        _, first_of_group, group = np.unique(keys, return_index=True, return_inverse=True)
        first = first_of_group[group]  # of each document, the first one with its key
        candidates = np.flatnonzero((first != np.arange(num_documents)) & ~is_like)
        for chunk in np.array_split(candidates, len(candidates) // 100_000 + 1):
            similarity = (hashes[chunk] == hashes[first[chunk]]).mean(1)
            is_like[chunk] |= similarity >= LIKENESS
    file.unlink()
    return is_like


def minhashes(
    store: TokenFiles, encoder: DocumentEncoder | None = None
) -> Iterator[NDArray[np.uint32]]:
    """Yield the hashes of batches of documents: [documents, BANDS * ROWS]. With an encoder, of comparable texts."""
    try:
        from rensa import RMinHash
    except ImportError as problem:
        raise ResourceError(
            f"`data.deduplicate: near` needs rensa: {install_line('dedup')}."
        ) from problem
    first = 0
    while first < len(store.hashes):
        last_token = store.offsets[first] + CHUNK_TOKENS
        after = max(first + 1, int(np.searchsorted(store.offsets, last_token, "right")) - 1)
        offsets = store.offsets[first : after + 1] - store.offsets[first]
        tokens = store.tokens[store.offsets[first] : store.offsets[after]]
        if encoder is not None:
            texts = encoder.decode_documents(tokens, offsets)
            tokens, lengths = encoder.text_ids(list(map(comparable, texts)))
            offsets = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
        hashes, bounds = shingles(tokens, offsets)
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(hashes, bounds, BANDS * ROWS, 42)
        yield np.array(matrix.to_rows(), np.uint32)
        first = after


def shingles(tokens: NDArray[np.unsignedinteger], offsets: Int64) -> tuple[Hashes, Hashes]:
    """A hash of each run of `SHINGLE` tokens of a document, and the first run of each document; at least one each."""
    padded = np.concatenate([tokens.astype(np.uint64), np.zeros(SHINGLE, np.uint64)])
    lengths = np.diff(offsets)
    counts = np.maximum(1, lengths - SHINGLE + 1)
    bounds = np.concatenate([np.zeros(1, np.int64), counts.cumsum()])
    begins = np.arange(bounds[-1]) + np.repeat(offsets[:-1] - bounds[:-1], counts)
    ends = np.repeat(offsets[1:], counts)
    hashes = np.zeros(len(begins), np.uint64)
    for step in range(SHINGLE):
        at = begins + step
        token = np.where(at < ends, padded[at] + np.uint64(1), np.uint64(0))
        hashes = (hashes ^ token) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    return hashes, bounds.astype(np.uint64)


@dataclass(frozen=True)
class Chosen:
    """The documents to train on, by number, and how many of the others were held out or skipped."""

    documents: Int64
    held_out: int
    left_out: dict[str, int]
    held_out_bytes: int
    left_out_bytes: dict[str, int]


@dataclass(frozen=True)
class Selection:
    held_out_share: float | None  # share of documents held out by the hash of their text
    evaluated: Hashes  # sorted hashes of evaluation documents
    repeated: Repeated | None
    max_tokens: int | None
    longest_held_out: int | None = None  # bytes; longer documents are always trained on

    def content(self) -> dict[str, Any]:
        return {
            "held_out_share": self.held_out_share,
            "judged": xxh3_128_hexdigest(self.evaluated.tobytes()),
            "repeated": None if self.repeated is None else self.repeated.name,
            "max_tokens": self.max_tokens,
            "longest_held_out": self.longest_held_out,
        }

    def choose(
        self, documents: StoredDocuments, shards: Sequence[int], tokens_before: int
    ) -> Chosen:
        sizes = documents.num_bytes
        left_out: dict[str, int] = {}
        left_out_bytes: dict[str, int] = {}
        for reason, mask in self.repeated_by_reason(shards).items():
            if mask.any():
                left_out[reason] = int(mask.sum())
                left_out_bytes[reason] = int(sizes[mask].sum())
        is_first = self.is_first(documents, shards)
        is_evaluated = np.isin(documents.hashes, self.evaluated)
        numbers = np.flatnonzero(is_first & ~self.is_held_out(documents) & ~is_evaluated)
        held_out = int(is_first.sum()) - len(numbers)
        held_out_bytes = int(np.dot(is_first, sizes) - sizes[numbers].sum())
        if self.max_tokens is not None:
            tokens = tokens_before + np.diff(documents.offsets)[numbers].cumsum()
            num_allowed = int(np.searchsorted(tokens, self.max_tokens, "right"))
            if num_allowed < len(numbers):
                left_out[AFTER_MAX_TOKENS] = len(numbers) - num_allowed
                left_out_bytes[AFTER_MAX_TOKENS] = int(sizes[numbers[num_allowed:]].sum())
            numbers = numbers[:num_allowed]
        return Chosen(
            documents=numbers,
            held_out=held_out,
            left_out=left_out,
            held_out_bytes=held_out_bytes,
            left_out_bytes=left_out_bytes,
        )

    def held_out(self, documents: StoredDocuments, shards: Sequence[int]) -> Int64:
        """The documents held out by the hash of their text, each text once."""
        return np.flatnonzero(self.is_held_out(documents) & self.is_first(documents, shards))

    def is_held_out(self, documents: StoredDocuments) -> Mask:
        if self.held_out_share is None:
            return np.zeros(len(documents), bool)
        return is_held_out(
            documents.hashes, documents.num_bytes, self.held_out_share, self.longest_held_out
        )

    def is_first(self, documents: StoredDocuments, shards: Sequence[int]) -> Mask:
        """True for documents that do not repeat an earlier one."""
        repeated = self.repeated_by_reason(shards).values()
        return ~np.logical_or.reduce([*repeated, np.zeros(len(documents), bool)])

    def repeated_by_reason(self, shards: Sequence[int]) -> dict[str, Mask]:
        return {} if self.repeated is None else self.repeated.of_shards(shards)


def is_held_out(hashes: Hashes, num_bytes: Int64, share: float, longest: int | None = None) -> Mask:
    is_chosen: Mask = hashes < np.uint64(int(share * 2**64))
    if longest is not None:
        is_chosen &= num_bytes <= longest
    return is_chosen


def longest_held_out(total_bytes: int, num_documents: int, share: float) -> int:
    """The maximum size of a held-out document in bytes, so that no single document dominates the result."""
    return int(total_bytes * max(LARGEST_PART * share, LARGEST_OF_AVERAGE / max(1, num_documents)))
