"""The order of training: which row of which source is global row i, a function of (sources, weights, seed, i) and of nothing else."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset
from xxhash import xxh3_64_intdigest

from cpt.data.rows import PackedRows, Row

ENDLESS = 10**12  # rows that can be asked for; sources begin anew, in another order, when they are used up
SHARE_UNIT = 2**32  # weights are kept as whole numbers of this size, so that counting rows is exact
SMALL = 2**16  # rows; below it grain's shuffle is slow (measured: 10 ms for one of 2 rows, 0.03 ms of 1,000, 0.004 ms from 65,536 on)


class MixtureRows(Dataset[Row]):
    """Endless rows of a weighted mixture, by global number.

    Each source is gone through completely, in an order drawn from the seed, before it begins anew in another order. Among the first n rows
    each source has its share of n, to within one row per source, so weights of rows are weights of tokens up to padding.
    """

    def __init__(self, sources: Sequence[PackedRows], weights: Sequence[float], seed: int) -> None:
        self.sources, self.seed = list(sources), seed
        self.proportions = [max(1, round(weight / sum(weights) * SHARE_UNIT)) for weight in weights]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, number: int) -> Row:
        source, row = self.locate(number)
        return self.sources[source][row]

    def source_of(self, number: int) -> int:
        """Which source, counted as in the recipe, global row `number` comes from."""
        return self.locate(number)[0]

    def locate(self, number: int) -> tuple[int, int]:
        """The source of a global row and the row's number there."""
        if not 0 <= number < ENDLESS:
            raise IndexError(f"row {number}: rows go from 0 to {ENDLESS - 1}")
        source, turn = share_out(int(number), self.proportions)
        epoch, place = divmod(turn, len(self.sources[source]))
        return source, shuffled(place, len(self.sources[source]), xxh3_64_intdigest(f"{self.seed} {source} {epoch}".encode()) % 2**32)


def share_out(number: int, proportions: Sequence[int]) -> tuple[int, int]:
    """The source whose turn it is, and how many turns it had before.

    Of the first n rows, the first source takes ceil(n * p / total) and leaves the others to be shared out in the same way. This is what
    grain's MapDataset.mix does, but for its rounding of weights to 1/100 of the smallest one, which turns 1.009 : 1 into 1 : 1.
    """
    before, upto, total = number, number + 1, sum(proportions)
    for source, proportion in enumerate(proportions):
        left_before, left_upto = (n * (total - proportion) // total for n in (before, upto))
        if before - left_before != upto - left_upto:
            return source, before - left_before
        before, upto, total = left_before, left_upto, total - proportion
    raise AssertionError("the last source takes what is left")


def shuffled(place: int, size: int, seed: int) -> int:
    """Where a permutation of `size` rows, drawn from the seed, puts `place`; without storing it where it would be large."""
    if size < SMALL:
        return int(permutation(size, seed)[place])
    return index_shuffle()(place, max_index=size - 1, seed=seed, rounds=4)


@lru_cache(maxsize=64)
def permutation(size: int, seed: int) -> NDArray[np.int64]:
    """A whole permutation, kept for the sources and epochs in use."""
    return np.random.default_rng(seed).permutation(size)


@cache
def index_shuffle() -> Callable[..., int]:
    """grain's permutation that is computed and not stored."""
    from absl import logging

    logging.set_verbosity(logging.ERROR)  # importing grain prints a warning where there is no jax
    from grain.experimental import index_shuffle

    return index_shuffle
