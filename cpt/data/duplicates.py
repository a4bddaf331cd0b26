"""Which documents of a source were there before: the same text, or nearly the same.

The stored documents are compared, not the stream while it is read, so the answer is the same however many processes tokenised them. The
first of equal documents stays, in the order of the source.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cpt.data.store import TokenStore, key_of, open_array, publish_once
from cpt.errors import ResourceError

FORMAT = 1  # of what is kept of a comparison; counts up when it is made another way
SHINGLE = 5  # tokens; the numbers are FineWeb's (arxiv.org/abs/2406.17557, section 3.4): 14 bands of 8 find a likeness of 0.75 with 77 %
BANDS, ROWS = 14, 8
LIKENESS = 0.75  # share of shingles in common (Jaccard) from which on documents are nearly the same, as estimated by the 112 hashes
CHUNK_TOKENS = 4_000_000


def repeated_documents(store: TokenStore, deduplicate: str | None, cache_dir: Path) -> dict[str, NDArray[np.bool_]]:
    """Which documents are left out, by reason; at most one reason each.

    Args:
        deduplicate: exact, near (which finds equal ones too) or None.

    Raises:
        ResourceError: near duplicates are asked for, and their library is not installed.
    """
    if deduplicate is None:
        return {}
    equal = ~first_of_each(store.hashes)
    if deduplicate == "exact":
        return {"exact duplicate": equal}
    return {"exact duplicate": equal, "near duplicate": near_duplicates(store, cache_dir) & ~equal}


def first_of_each(hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """True for the first document of each text; hashes of 64 bits confuse two of 10^8 texts with a probability of 0.03 %."""
    is_first = np.zeros(len(hashes), bool)
    is_first[np.unique(hashes, return_index=True)[1]] = True
    return is_first


def near_duplicates(store: TokenStore, cache_dir: Path) -> NDArray[np.bool_]:
    """True for documents much like an earlier one (MinHash, doi.org/10.1109/SEQUEN.1997.666900); worked out once and kept in `cache_dir`.

    An earlier document is found where one of `BANDS` groups of hashes is the same. What is like a document that is itself left out is left
    out too. The hashes lie in a file meanwhile, 448 bytes a document; the memory needed is some 100 bytes a document (estimated).
    """
    what = {"format": FORMAT, "store": store.description.digest, "numbers": [SHINGLE, BANDS, ROWS, LIKENESS]}

    def fill(folder: Path) -> None:
        file = folder / "hashes.bin"
        hashes = np.memmap(file, np.uint32, "w+", shape=(len(store.hashes), BANDS * ROWS))
        at = 0
        for some in minhashes(store):
            hashes[at : at + len(some)] = some
            at += len(some)
        np.save(folder / "is_like_earlier.npy", is_like_earlier(hashes))
        file.unlink()

    return open_array(publish_once(cache_dir / "duplicates" / key_of(what), fill) / "is_like_earlier.npy")


def minhashes(store: TokenStore) -> Iterator[NDArray[np.uint32]]:
    """The hashes of some documents after the other: [documents, BANDS * ROWS]."""
    try:
        from rensa import RMinHash
    except ImportError as problem:
        raise ResourceError("`data.deduplicate: near` needs rensa: pip install 'cpt[dedup]'.") from problem
    first = 0
    while first < len(store.hashes):
        after = max(first + 1, int(np.searchsorted(store.offsets, store.offsets[first] + CHUNK_TOKENS, "right")) - 1)
        offsets = store.offsets[first : after + 1] - store.offsets[first]
        hashes, bounds = shingles(store.tokens[store.offsets[first] : store.offsets[after]], offsets)
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(hashes, bounds, BANDS * ROWS, 42)
        yield np.array(matrix.to_rows(), np.uint32)
        first = after


def shingles(tokens: NDArray[np.unsignedinteger], offsets: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """A hash of each run of `SHINGLE` tokens inside a document, and where each document's begin; a shorter document is one run."""
    padded = np.concatenate([tokens.astype(np.uint64), np.zeros(SHINGLE, np.uint64)])
    lengths = np.diff(offsets)
    counts = np.maximum(1, lengths - SHINGLE + 1)
    bounds = np.concatenate([np.zeros(1, np.int64), counts.cumsum()])
    begins = np.arange(bounds[-1]) + np.repeat(offsets[:-1] - bounds[:-1], counts)
    ends = np.repeat(offsets[1:], counts)
    hashes = np.zeros(len(begins), np.uint64)
    for place in range(SHINGLE):
        token = np.where(begins + place < ends, padded[begins + place] + np.uint64(1), np.uint64(0))
        hashes = (hashes ^ token) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    return hashes, bounds.astype(np.uint64)


def is_like_earlier(hashes: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Whether a document is like the first one that has the same hashes in one of the bands."""
    like = np.zeros(len(hashes), bool)
    for band in range(BANDS):
        rows = np.ascontiguousarray(hashes[:, band * ROWS : (band + 1) * ROWS])
        _, first, group = np.unique(rows.view(f"V{ROWS * 4}").ravel(), return_index=True, return_inverse=True)
        candidates = np.flatnonzero((first[group] != np.arange(len(hashes))) & ~like)
        for some in np.array_split(candidates, len(candidates) // 100_000 + 1):
            like[some] |= (hashes[some] == hashes[first[group[some]]]).mean(1) >= LIKENESS
    return like
