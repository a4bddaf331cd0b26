import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpt.data.packing import PACKINGS, open_packing, pack, pack_once

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def documents(lengths):
    lengths = np.array(lengths, np.int64)
    return lengths.cumsum() - lengths, lengths


def rows_of(packing):
    pieces = list(zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True))
    return [pieces[first:after] for first, after in zip(packing.first_piece, packing.first_piece[1:], strict=False)]


@pytest.mark.parametrize("name", PACKINGS)
@given(LENGTHS, st.integers(1, 16), st.integers(0, 3))
def test_every_token_stands_in_exactly_one_row(name, lengths, sequence_length, seed):
    packing = pack(*documents(lengths), sequence_length, name, seed)
    tokens = [token for row in rows_of(packing) for start, length in row for token in range(start, start + length)]
    assert sorted(tokens) == list(range(sum(lengths)))


@pytest.mark.parametrize("name", PACKINGS)
@given(LENGTHS, st.integers(1, 16))
def test_no_row_is_empty_or_too_long(name, lengths, sequence_length):
    for row in rows_of(pack(*documents(lengths), sequence_length, name, 0)):
        assert 1 <= sum(length for _, length in row) <= sequence_length


@pytest.mark.parametrize("name", PACKINGS)
@given(LENGTHS, st.integers(1, 16))
def test_only_documents_longer_than_a_row_are_cut(name, lengths, sequence_length):
    packing = pack(*documents(lengths), sequence_length, name, 0)
    assert len(packing.starts) == sum(-(-length // sequence_length) for length in lengths)


@given(LENGTHS, st.integers(1, 16))
def test_best_fit_equals_the_plain_algorithm(lengths, sequence_length):
    pieces = [min(sequence_length, n - at) for n in lengths for at in range(0, n, sequence_length)]
    room: list[int] = []
    for piece in sorted(pieces, reverse=True):
        fullest = min((left for left in room if left >= piece), default=None)
        if fullest is None:
            room.append(sequence_length - piece)
        else:
            room[room.index(fullest)] = fullest - piece
    rows = rows_of(pack(*documents(lengths), sequence_length, "best_fit", 0))
    assert sorted(sequence_length - sum(length for _, length in row) for row in rows) == sorted(room)


def test_one_document_a_row_without_packing():
    packing = pack(*documents([3, 5, 10]), 4, "none", 0)
    assert sorted(length for row in rows_of(packing) for _, length in row) == [1, 2, 3, 4, 4, 4]
    assert all(len(row) == 1 for row in rows_of(packing))


def test_the_seed_decides_which_equal_documents_come_together():
    first, again, other = (rows_of(pack(*documents([3] * 50), 9, "best_fit", seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_many_documents_are_packed_densely_and_at_once():
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(6, 1.2, 100_000)).astype(np.int64)
    packing = pack(*documents(lengths), 2048, "best_fit", 0)
    assert lengths.sum() / (packing.num_rows * 2048) > 0.9998


def test_a_packing_is_stored_once_and_read_back(tmp_path):
    starts, lengths = documents([3, 5, 10])
    folder = pack_once("digest", starts, lengths, 4, "best_fit", 0, tmp_path)
    packing = pack(starts, lengths, 4, "best_fit", 0)
    assert open_packing(folder).digest() == packing.digest()
    assert pack_once("digest", starts, lengths, 4, "best_fit", 0, tmp_path) == folder


@pytest.mark.parametrize("change", [{"store_digest": "x"}, {"starts": 1}, {"sequence_length": 5}, {"packing": "none"}, {"seed": 1}])
def test_another_packing_has_another_folder(tmp_path, change):
    starts, lengths = documents([3, 5, 10])
    asked = {"store_digest": "d", "starts": starts, "lengths": lengths, "sequence_length": 4, "packing": "best_fit", "seed": 0}
    other = {**asked, **change}
    if "starts" in change:
        other |= {"starts": starts[1:], "lengths": lengths[1:]}
    assert pack_once(**asked, cache_dir=tmp_path) != pack_once(**other, cache_dir=tmp_path)
