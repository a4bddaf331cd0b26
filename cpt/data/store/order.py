"""Permutations that are computed and not stored: where row `place` of an epoch comes from."""

from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

# Rows; below it grain's shuffle is slow (measured: 10 ms for one of 2 rows, 0.03 of 1,000, 0.004 from 65,536 on).
SMALL = 2**16


def seed_of(*parts: object) -> int:
    """A seed of 32 bits for each list of parts."""
    return xxh3_64_intdigest(" ".join(map(str, parts)).encode()) % 2**32


def shuffled(place: int, size: int, seed: int) -> int:
    """Where a permutation of `size` rows, drawn from the seed, puts `place`; without storing it where it would be
    large."""
    if size < SMALL:
        return int(permutation(size, seed)[place])
    return index_shuffle()(place, max_index=size - 1, seed=seed, rounds=4)


@lru_cache(maxsize=64)
def permutation(size: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(size)


@cache
def index_shuffle() -> Callable[..., int]:
    """grain's permutation that is computed and not stored."""
    from absl import logging

    logging.set_verbosity(logging.ERROR)  # importing grain prints a warning where there is no jax
    from grain.experimental import index_shuffle

    return index_shuffle
