import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt.data.rows.packing import PACKINGS, pack

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)
FEWER = settings(max_examples=40)


def documents(lengths):
    lengths = np.array(lengths, np.int64)
    return lengths.cumsum() - lengths, lengths


def rows_of(packing):
    pieces = list(zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True))
    return [
        pieces[first:after]
        for first, after in zip(packing.first_piece, packing.first_piece[1:], strict=False)
    ]


@pytest.mark.parametrize("name", PACKINGS)
@given(LENGTHS, st.integers(1, 16), st.integers(0, 5))
@FEWER
def test_every_piece_is_in_one_row_of_every_epoch(name, lengths, sequence_length, epoch):
    packing = pack(*documents(lengths), sequence_length, name, 0, max(1, sequence_length // 2))
    rows = [packing.pieces(row, epoch) for row in range(packing.num_rows)]
    pieces = [
        piece
        for starts, sizes in rows
        for piece in zip(starts.tolist(), sizes.tolist(), strict=True)
    ]
    assert sorted(pieces) == sorted(
        zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True)
    )
    assert all(sizes.sum() <= sequence_length for _, sizes in rows)


@given(LENGTHS, st.integers(2, 16), st.booleans())
@FEWER
def test_a_long_document_is_cut_every_stride_tokens_to_its_end(lengths, sequence_length, overlaps):
    stride = sequence_length - overlaps
    expected, begin = [], 0
    for length in lengths:
        at = 0
        while at == 0 or at - stride + sequence_length < length:
            expected.append((begin + at, min(sequence_length, length - at)))
            at += stride
        begin += length
    for name in ("best_fit", "none", "token_budget"):
        packing = pack(*documents(lengths), sequence_length, name, 3, stride)
        pieces = zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True)
        assert sorted(pieces) == sorted(expected)
        assert name != "none" or packing.num_rows == len(expected)


@given(LENGTHS, st.integers(1, 16))
@FEWER
def test_concatenated_documents_fill_every_row_but_the_last(lengths, sequence_length):
    packing = pack(*documents(lengths), sequence_length, "concatenate", 3)
    sizes = [sum(length for _, length in row) for row in rows_of(packing)]
    full, rest = divmod(sum(lengths), sequence_length)
    assert sizes == [sequence_length] * full + [rest] * (rest > 0)
    tokens = [
        at
        for start, length in zip(packing.starts, packing.lengths, strict=True)
        for at in range(start, start + length)
    ]
    assert sorted(tokens) == list(range(sum(lengths)))


@given(LENGTHS, st.integers(1, 16))
@FEWER
def test_best_fit_equals_the_plain_algorithm(lengths, sequence_length):
    pieces = [min(sequence_length, n - at) for n in lengths for at in range(0, n, sequence_length)]
    room: list[int] = []
    for piece in sorted(pieces, reverse=True):
        fullest = min((left for left in room if left >= piece), default=None)
        if fullest is None:
            room.append(sequence_length - piece)
        else:
            room[room.index(fullest)] = fullest - piece
    packing = pack(*documents(lengths), sequence_length, "best_fit", 0)
    found = [sequence_length - sum(length for _, length in row) for row in rows_of(packing)]
    assert sorted(found) == sorted(room) and sorted(packing.lengths) == sorted(pieces)


@given(LENGTHS, st.integers(1, 40), st.integers(0, 4))
@FEWER
def test_a_token_budget_holds_for_the_padded_documents_of_every_epoch(lengths, budget, epoch):
    packing = pack(*documents(lengths), budget, "token_budget", 0)
    for row in range(packing.num_rows):
        _, sizes = packing.pieces(row, epoch)
        assert len(sizes) * sizes.max() <= budget
