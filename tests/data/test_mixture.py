from collections import Counter
from dataclasses import replace
from itertools import accumulate

import torch
from hypothesis import given
from hypothesis import strategies as st

from cpt.data.rows.build import build_data
from cpt.data.rows.mixture import MixtureRows, Stretch, Turns
from cpt.data.rows.packing import stack_rows
from cpt.data.store.shards import seed_of, shuffled
from cpt.recipe.schema import Data


class Numbers(list):
    """Stands for a source's rows where only their number matters."""

    def row_at(self, turn, seed):
        epoch, place = divmod(turn, len(self))
        return self, shuffled(place, len(self), seed_of(seed, epoch)), epoch

    def row(self, number, epoch):
        return self[number]


def located(rows, number):
    """The source of a global row, and the row's number there."""
    return rows.turn(number)[0], rows.row_at(number)[1]


def mixture(sizes, weights, seed=1):
    return phased([(0, weights)], sizes, seed)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_any_beginning_has_the_shares_to_within_one_row_a_source(proportions):
    counts, turns = [0] * len(proportions), Turns([(0, proportions)])
    for number in range(200):
        counts[turns.turn(number)[0]] += 1
        for count, proportion in zip(counts, proportions, strict=True):
            assert abs(count - (number + 1) * proportion / sum(proportions)) <= len(proportions)


def test_each_epoch_of_a_source_has_every_row_once_in_another_order():
    rows = mixture([50], [1])
    epochs = [[rows[epoch * 50 + place] for place in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_is_the_one_of_every_other_version():
    """Another order here would make the runs of this version impossible to resume."""
    rows = mixture([5, 70_000], [0.7, 0.3])
    assert [located(rows, number) for number in (0, 1, 2, 3, 10**9, 10**9 + 1)] == [
        (0, 4),
        (0, 3),
        (0, 1),
        (1, 41013),
        (0, 0),
        (0, 3),
    ]


def test_a_position_is_a_stretch_and_a_row_in_it():
    first, second = mixture([5], [1]).stretches[0], mixture([7], [1]).stretches[0]
    rows = MixtureRows([first, replace(second, first_row=8)], seed=1)
    assert [rows.stretch_at(number)[::2] for number in (0, 7, 8, 10)] == [(0, 0), (0, 7), (1, 0), (1, 2)]
    assert rows[10] == mixture([7], [1])[2]


PLANS = st.lists(  # 1 to 5 phases of 1 to 60 rows over 3 sources, some of them left out
    st.tuples(st.integers(1, 60), st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any)),
    min_size=1,
    max_size=5,
)


def phased(plan, sizes=(7, 5, 11), seed=1):
    firsts = [0, *accumulate(rows for rows, _ in plan)]
    turns = Turns([(row, weights) for row, (_, weights) in zip(firsts, plan, strict=False)])
    return MixtureRows([Stretch([Numbers(range(size)) for size in sizes], turns, [])], seed)


@given(PLANS)
def test_each_phase_has_its_own_quotas_to_within_one_row_a_source(plan):
    rows, first = phased(plan), 0
    for length, weights in plan:
        taken = Counter(rows.turn(number)[0] for number in range(first, first + length))
        for source, weight in enumerate(weights):
            assert abs(taken[source] - length * weight / sum(weights)) < (2 if weight else 1e-9)
        first += length


@given(PLANS)
def test_every_row_of_a_source_comes_once_an_epoch_across_phases_and_not_in_file_order(plan):
    rows, length = phased(plan, sizes=(9, 9, 9)), sum(rows for rows, _ in plan) + 60
    for source in range(3):
        read = [row for which, row in (located(rows, number) for number in range(length)) if which == source]
        epochs = [read[first : first + 9] for first in range(0, len(read), 9)]
        assert all(sorted(epoch) == list(range(9)) for epoch in epochs[:-1])
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
        assert len(epochs) < 4 or len({tuple(epoch) for epoch in epochs[:-1]}) > 1


@given(st.lists(st.integers(1, 9), min_size=3, max_size=60), st.lists(st.integers(1, 50), min_size=120, max_size=120))
def test_many_short_blocks_add_up_to_their_shares(lengths, weights):
    """As in a linear change of a short phase: rounding must not favour a source in each block anew."""
    blocks = [(length, weights[2 * number : 2 * number + 2]) for number, length in enumerate(lengths)]
    firsts = [0, *accumulate(lengths)]
    turns = Turns(
        [*((first, shares) for first, (_, shares) in zip(firsts, blocks, strict=False)), (firsts[-1], [1, 1])]
    )
    asked = sum(length * first / (first + second) for length, (first, second) in blocks)
    assert abs(turns.counts(firsts[-1])[0] - asked) < 1.5


def test_a_batch_is_what_its_rows_are(tokenizer, source, tmp_path):
    sources = [source("a", ["one", "two " * 9, "three"] * 20), source("b", ["x" * 40] * 9)]
    for packing in ("best_fit", "none", "token_budget"):
        rows = build_data(
            Data(sources=sources, sequence_length=16, packing=packing), tokenizer, seed=1, cache_dir=tmp_path
        ).rows
        numbers = [5] if packing == "token_budget" else [0, 1, 2, 700, 3]
        batch, stacked = rows.batch(numbers), stack_rows([rows[number] for number in numbers])
        assert batch.keys() == stacked.keys() and all(torch.equal(batch[name], stacked[name]) for name in batch)
