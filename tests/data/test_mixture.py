import pickle
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpt.data.build import build_data
from cpt.data.mixture import ENDLESS, MixtureRows, share_out, shuffled
from cpt.recipe.schema import Data


class Numbers(list):
    """Stands for a source's rows where only their number matters."""


def mixture(sizes, weights, seed=1):
    return MixtureRows([Numbers(range(size)) for size in sizes], weights, seed)


@pytest.mark.parametrize("weights", [[0.7, 0.3], [1.009, 1], [1, 2, 3.3], [1e-4, 1], [5], [1] * 7])
@pytest.mark.parametrize("start", [0, 10**9])
def test_shares_are_within_a_tenth_of_a_point(weights, start):
    rows = mixture([100] * len(weights), weights)
    counts = [0] * len(weights)
    for number in range(start, start + 20_000):
        counts[rows.source_of(number)] += 1
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count / 20_000 - weight / sum(weights)) < 0.001


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 10**12))
def test_each_source_takes_its_turns_one_after_the_other(proportions, start):
    turns: dict[int, list[int]] = {}
    for number in range(start, start + 100):
        source, turn = share_out(number, proportions)
        turns.setdefault(source, []).append(turn)
    for taken in turns.values():
        assert taken == list(range(taken[0], taken[0] + len(taken)))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_any_beginning_has_the_shares_to_within_one_row_a_source(proportions):
    counts = [0] * len(proportions)
    for number in range(200):
        counts[share_out(number, proportions)[0]] += 1
        for count, proportion in zip(counts, proportions, strict=True):
            assert abs(count - (number + 1) * proportion / sum(proportions)) <= len(proportions)


@pytest.mark.parametrize("size", [1, 2, 3, 100, 65_535, 65_536, 100_000])
def test_an_epoch_is_a_permutation_and_not_the_identity(size):
    places = [shuffled(place, size, seed=5) for place in range(size)]
    assert sorted(places) == list(range(size))
    if size >= 100:
        assert sum(place == number for number, place in enumerate(places)) < 10
        assert abs(sum(places[: size // 2]) / (size // 2) - size / 2) < 0.2 * size


def test_each_epoch_of_a_source_has_every_row_once_in_another_order():
    rows = mixture([50], [1])
    epochs = [[rows[epoch * 50 + place] for place in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_small_source_is_repeated_while_a_large_one_goes_on():
    rows = mixture([10, 100_000], [1, 1])
    places = [rows.locate(number) for number in range(200)]
    assert [sum(place == (0, row) for place in places) for row in range(10)] == [10] * 10
    assert len({place for place in places if place[0] == 1}) == 100


def test_sources_of_one_size_have_different_orders_and_so_have_seeds():
    rows = mixture([100, 100], [1, 1])
    orders = [[row for source, row in map(rows.locate, range(200)) if source == which] for which in (0, 1)]
    other = [row for source, row in map(mixture([100, 100], [1, 1], seed=2).locate, range(200)) if source == 0]
    assert orders[0] != orders[1] and orders[0] != other


def test_the_order_is_the_one_of_every_other_version():
    """Another order here would make the runs of this version impossible to resume."""
    rows = mixture([5, 70_000], [0.7, 0.3])
    assert [rows.locate(number) for number in (0, 1, 2, 3, 10**9, 10**9 + 1)] == [(0, 4), (0, 3), (0, 1), (1, 41013), (0, 0), (0, 3)]


def test_any_row_is_there_at_once():
    rows = mixture([1000, 10**6], [0.5, 0.5])
    rows.locate(0), rows.locate(1)  # grain is imported with the first row of a large source
    started = time.perf_counter()
    for number in (10**9, 10**11, ENDLESS - 1):
        assert rows.locate(number) == rows.locate(number)
    assert time.perf_counter() - started < 1
    for number in (-1, ENDLESS):
        with pytest.raises(IndexError):
            rows.locate(number)


def test_only_the_ratio_of_weights_counts():
    assert mixture([9, 9], [7, 3]).proportions == mixture([9, 9], [0.7, 0.3]).proportions


def test_a_mixture_travels_to_other_processes(tokenizer, source, tmp_path):
    data = Data(sources=[source("a", ["one"] * 30), source("b", ["two"] * 50)], sequence_length=16)
    rows = build_data(data, tokenizer, seed=3, cache_dir=tmp_path).rows
    other = pickle.loads(pickle.dumps(rows))
    assert all(torch.equal(rows[number]["input_ids"], other[number]["input_ids"]) for number in range(20))
