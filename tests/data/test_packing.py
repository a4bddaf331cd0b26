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
    return [pieces[first:after] for first, after in zip(packing.first_piece, packing.first_piece[1:], strict=False)]


@pytest.mark.parametrize("name", PACKINGS)
@given(LENGTHS, st.integers(1, 16), st.integers(0, 5))
@FEWER
def test_every_piece_is_in_one_row_of_every_epoch(name, lengths, sequence_length, epoch):
    packing = pack(*documents(lengths), sequence_length, name, 0, max(1, sequence_length // 2))
    rows = [packing.pieces(row, epoch) for row in range(packing.num_rows)]
    pieces = [piece for starts, sizes in rows for piece in zip(starts.tolist(), sizes.tolist(), strict=True)]
    assert sorted(pieces) == sorted(zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True))
    assert all(sizes.sum() <= sequence_length for _, sizes in rows)


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


@given(LENGTHS, st.integers(1, 16), st.integers(0, 3))
@FEWER
def test_a_concatenated_document_continues_where_the_row_before_ended(lengths, sequence_length, seed):
    starts, _ = documents(lengths)
    packing = pack(*documents(lengths), sequence_length, "concatenate", seed)
    pieces = [piece for row in rows_of(packing) for piece in row]
    for (start, length), (following, _) in zip(pieces, pieces[1:], strict=False):
        assert following == start + length or following in starts
    assert len(pieces) <= len(lengths) + sum(lengths) // sequence_length


@given(LENGTHS, st.integers(1, 40), st.integers(0, 4))
@FEWER
def test_a_token_budget_holds_for_the_padded_documents_of_every_epoch(lengths, budget, epoch):
    packing = pack(*documents(lengths), budget, "token_budget", 0)
    for row in range(packing.num_rows):
        _, sizes = packing.pieces(row, epoch)
        assert len(sizes) * sizes.max() <= budget


def test_a_row_of_a_token_budget_holds_each_piece_in_a_line(build, source, tokenizer):
    texts = ["abc" * (1 + number % 9) + "a" * (number % 5) for number in range(40)]
    rows = build(source("a", texts), sequence_length=16, packing="token_budget").chunked[0].chunk(0)
    found, names = [], ("input_ids", "labels", "position_ids", "attention_mask")
    for row in (rows.row(number, 3) for number in range(len(rows))):
        assert row["input_ids"].numel() <= 16 and len({values.shape for values in row.values()}) == 1
        for ids, labels, positions, mask in zip(*(row[name].tolist() for name in names), strict=True):
            length = sum(mask)
            padding = len(ids) - length
            assert mask == [1] * length + [0] * padding and positions == list(range(len(ids)))
            assert labels == [-100, *ids[1:length], *[-100] * padding] and set(ids[length:]) <= {257}
            found.append(ids[:length])
    encoded = [[*tokenizer(text)["input_ids"], 256] for text in texts]
    assert sorted(found) == sorted(ids[at : at + 16] for ids in encoded for at in range(0, len(ids), 16))
