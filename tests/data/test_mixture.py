from collections import Counter
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from cpt.data.rows.build import rows_of_run
from cpt.data.rows.chunks import shuffled
from cpt.data.rows.loader import CPTDataLoader
from cpt.data.rows.mixture import (
    ENDLESS,
    MixtureRows,
    RowsOfSteps,
    Turns,
    cut_documents,
    from_row,
    lengths_of_phases,
    shares_of_phases,
    shares_over,
)
from cpt.data.store.shards import seed_of
from cpt.errors import RecipeError
from cpt.hf_internals import IGNORED
from cpt.recipe.schema import Budget, Data, Phase, Source


class Numbers(list):
    """The rows of a source where only their numbers matter."""

    def row_at(self, turn, seed):
        epoch, place = divmod(turn, len(self))
        return self, shuffled(place, len(self), seed_of(seed, epoch)), epoch

    def row(self, number, epoch):
        return self[number]


def phased(plan, sizes=(7, 5, 11)):
    firsts = [0, *accumulate(rows for rows, _ in plan)]
    turns = Turns([(row, weights) for row, (_, weights) in zip(firsts, plan, strict=False)])
    return MixtureRows([Numbers(range(size)) for size in sizes], turns, seed=1)


def located(rows, number):
    """The source of a global row, and the row's number there."""
    return rows.turn(number)[0], rows.row_at(number)[1]


PLANS = st.lists(  # 1 to 5 phases of 1 to 60 rows over 3 sources, some of them left out
    st.tuples(st.integers(1, 60), st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any)),
    min_size=1,
    max_size=5,
)


@given(PLANS)
@settings(max_examples=50)
def test_each_phase_has_its_own_quotas_to_within_one_row_a_source(plan):
    rows, first = phased(plan), 0
    for length, weights in plan:
        taken = Counter(rows.turn(number)[0] for number in range(first, first + length))
        for source, weight in enumerate(weights):
            assert abs(taken[source] - length * weight / sum(weights)) < (2 if weight else 1e-9)
        first += length


@given(PLANS)
@settings(max_examples=50)
def test_every_row_of_a_source_comes_once_an_epoch_across_phases_and_not_in_file_order(plan):
    rows, length = phased(plan, sizes=(9, 9, 9)), sum(rows for rows, _ in plan) + 60
    for source in range(3):
        read = [
            row
            for which, row in (located(rows, number) for number in range(length))
            if which == source
        ]
        epochs = [read[first : first + 9] for first in range(0, len(read), 9)]
        assert all(sorted(epoch) == list(range(9)) for epoch in epochs[:-1])
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
        assert len(epochs) < 4 or len({tuple(epoch) for epoch in epochs[:-1]}) > 1


BLOCK = st.tuples(st.integers(1, 9), st.lists(st.integers(1, 50), min_size=2, max_size=2))


@given(st.lists(BLOCK, min_size=3, max_size=60))
@settings(max_examples=40)
def test_many_short_blocks_add_up_to_their_shares(blocks):
    """As in a linear change of a short phase: rounding must not favour a source in each block anew."""
    firsts = [0, *accumulate(length for length, _ in blocks)]
    turns = Turns(list(zip(firsts, [*(shares for _, shares in blocks), [1, 1]], strict=True)))
    expected = sum(length * first / (first + second) for length, (first, second) in blocks)
    assert abs(turns.counts(firsts[-1])[0] - expected) < 1.5


def test_the_shares_of_turns_are_those_from_a_row_on():
    turns = Turns([(0, [3, 1, 0]), (7, [0, 1, 4]), (12, [0, 0, 1])], rows_read=[10, 20, 30])
    assert turns.shares(0) == turns.shares(6) == pytest.approx([5 / 7, 2 / 7, 0])
    assert turns.shares(7) == turns.shares(11) == pytest.approx([0, 1 / 5, 4 / 5])
    assert turns.shares(12) == turns.shares(10**9) == [0, 0, 1]
    assert turns.counts(0) == [10, 20, 30]
    assert turns.counts(7) == [15, 22, 30]
    assert turns.counts(12) == [15, 23, 34]
    assert turns.counts(20) == [15, 23, 42]
    assert [turns.turn(number) for number in (6, 12, 13)] == [(1, 21), (2, 34), (2, 35)]


def test_a_weight_close_to_nothing_has_turns_and_one_of_nothing_has_none():
    turns = Turns([(0, [1e-30, 0, 1.0])])
    assert turns.proportions == [[1, 0, 2**32]]
    assert turns.counts(2**33) == [2, 0, 2**33 - 2]


def test_rows_are_those_from_the_first_one_on():
    sources = [Numbers(range(size)) for size in (3, 5)]
    turns = Turns([(0, [1, 2])], rows_read=[3, 4])
    rows = MixtureRows(sources, turns, seed=1, first_row=7, numbers=[4, 2])
    assert [rows.turn(number)[0] for number in range(7, 13)] == [0, 1, 1, 0, 1, 1]
    assert rows.counts(0) == [0, 0] and rows.counts(7) == [3, 4] and rows.counts(13) == [5, 8]
    for number in (-1, 6, ENDLESS):
        with pytest.raises(IndexError, match=f"row {number}: expected 7 to"):
            rows.turn(number)
    assert rows.turn(ENDLESS - 1)[0] in (0, 1) and len(rows) == ENDLESS
    assert rows.row_at(7)[1:] == sources[0].row_at(3, "1 4")[1:]
    assert rows.row_at(8)[1:] == sources[1].row_at(4, "1 2")[1:]
    plain = MixtureRows(sources, turns, seed=1, first_row=7)
    assert plain.row_at(8)[1:] == sources[1].row_at(4, "1 1")[1:]


# What a recipe asks for

SOURCES = [Source(path="x/a", weight=3), Source(path="x/b", weight=1), Source(path="x/c", weight=4)]


def data_with(*phases, **options):
    return Data(sources=SOURCES, sequence_length=10, phases=list(phases), **options)


def plain(changes):
    return [(first, pytest.approx(list(shares))) for first, shares in changes]


def test_weights_and_temperature_are_shares_of_the_tokens():
    assert shares_of_phases(data_with(), [9, 1, 90]) == plain([(0, [3 / 8, 1 / 8, 4 / 8])])
    sizes = [16, 4, 36]
    assert shares_of_phases(data_with(temperature=1.0), sizes) == plain(
        [(0, [16 / 56, 4 / 56, 36 / 56])]
    )
    assert shares_of_phases(data_with(temperature=2.0), sizes) == plain(
        [(0, [4 / 12, 2 / 12, 6 / 12])]
    )


def test_phases_begin_at_the_nearest_row_and_may_change_linearly():
    phases = [
        Phase(until=104, weights={"a": 1, "b": 3}),
        Phase(until=106, weights={"c": 2}),
        Phase(until=1000, weights={"a": 1, "c": 1}, change="linear"),
        Phase(weights={"b": 1}, change="linear", until=1640),
    ]
    found = shares_of_phases(data_with(*phases), [])
    firsts = [first for first, _ in found]
    assert firsts[:2] == [0, 10] and len(found) == 2 + 2 * 65
    assert firsts[2:67] == [11 + 89 * block // 64 for block in range(65)]
    assert firsts[67:] == [100 + block for block in range(65)]
    first, middle, last = (shares.tolist() for shares in (found[2][1], found[34][1], found[66][1]))
    assert found[:2] == plain([(0, [0.25, 0.75, 0]), (10, [0, 0, 1])])
    assert first == pytest.approx([0.5 * 0.5 / 64, 0, 1 - 0.5 * 0.5 / 64])
    assert middle == pytest.approx([0.5 * 32.5 / 64, 0, 1 - 0.5 * 32.5 / 64])
    assert last == [0.5, 0, 0.5] and found[-1][1].tolist() == [0, 1, 0]
    changes = found[:2] + [(11, np.array([1.0, 0.0, 0.0]))]
    assert shares_over(changes, 16).tolist() == pytest.approx([7.5 / 16, 7.5 / 16, 1 / 16])
    assert shares_over(changes, 5).tolist() == shares_over(changes, 0).tolist() == [0.25, 0.75, 0]
    with pytest.raises(RecipeError, match=r"`data\.phases\[1\]\.until_learning_rate`"):
        shares_of_phases(data_with(phases[0], Phase(until_learning_rate=0.5, weights={"a": 1})), [])


def test_context_lengths_change_with_the_phases():
    weights = {"weights": {"a": 1}}
    assert lengths_of_phases(data_with(Phase(until=50, **weights), Phase(**weights))) == []
    phases = [
        Phase(until=54, context_length=4, **weights),
        Phase(until=96, **weights),
        Phase(context_length=5, **weights),
    ]
    lengths = lengths_of_phases(data_with(*phases))
    assert lengths == [(0, 4), (5, 10), (10, 5)]
    assert from_row(lengths, 0) == lengths
    assert from_row(lengths, 4) == [(0, 4), (1, 10), (6, 5)]
    assert from_row(lengths, 5) == [(0, 10), (5, 5)]
    assert from_row(lengths, 11) == [(0, 5)]


def test_documents_of_a_row_are_cut_without_a_label_for_the_first_token_of_a_piece():
    positions = np.array([0, 1, 2, 3, 4, 5, 6, 0, 1, 2])
    labels = np.arange(10, 20)
    labels[[0, 7]] = IGNORED
    cut = positions.copy(), labels.copy()
    cut_documents(*cut, 3)
    assert cut[0].tolist() == [0, 1, 2, 0, 1, 2, 0, 0, 1, 2]
    assert [at for at, label in enumerate(cut[1]) if label == IGNORED] == [0, 3, 6, 7]
    whole = positions.copy(), labels.copy()
    cut_documents(*whole, 10)
    assert whole[0].tolist() == positions.tolist() and whole[1].tolist() == labels.tolist()


# Skipped rows


class Indices(Dataset):
    def __getitem__(self, index):
        return {"input_ids": torch.tensor([index])}


def test_skipped_stretches_are_jumped_over():
    rows = RowsOfSteps(8)
    rows.leave_out([(16, 24), (40, 48)])
    assert [rows.of(step) for step in range(5)] == [(0, 8), (8, 16), (24, 32), (32, 40), (48, 56)]
    assert [rows.first(step) for step in range(5)] == [0, 8, 24, 32, 48]
    rows.leave_out([rows.of(1)])
    assert rows.left_out == [(8, 24), (40, 48)]
    assert [rows.first(step) for step in range(4)] == [0, 24, 32, 48]


@pytest.mark.parametrize(("world_size", "first_step"), [(1, 0), (2, 0), (1, 2)])
def test_the_loader_reads_the_rows_of_the_steps_on_any_number_of_processes_and_from_any_step(
    world_size, first_step
):
    rows = RowsOfSteps(8, [(8, 24), (40, 48)])
    read = {step: [] for step in range(first_step, 6)}
    for rank in range(world_size):
        options = {
            "rank": rank,
            "world_size": world_size,
            "first_row": first_step * 8,
            "left_out": rows.left_out,
        }
        for number, batch in enumerate(
            CPTDataLoader(Indices(), micro_batch=2, rows_in_all=6 * 8, **options)
        ):
            read[first_step + number // (4 // world_size)] += batch["input_ids"][:, 0].tolist()
    assert {step: sorted(numbers) for step, numbers in read.items()} == {
        step: list(range(*rows.of(step))) for step in read
    }


# How long a run is


@pytest.mark.parametrize(
    ("budget", "rows", "max_epochs"),
    [
        ({"tokens": 1001}, 11, None),
        ({"epochs": 2.5}, 25, None),
        ({"tokens": 1001, "global_batch_tokens": 400}, 12, None),
        ({"tokens": 1}, 1, None),
        ({"epochs": 1, "global_batch_tokens": 400}, 12, None),
        ({"epochs": 1, "global_batch_tokens": 400}, 8, 1),  # no row may be read twice
    ],
)
def test_a_run_is_as_long_as_its_budget_in_whole_steps(budget, rows, max_epochs):
    data = Data(sources=[Source(path="a/b", max_epochs=max_epochs)], sequence_length=100)
    assert rows_of_run(data, Budget(**budget), rows_of_epoch=10) == rows
