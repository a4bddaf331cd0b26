import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpt.data.rows.selection import Selection, part_by_score


class Documents:
    """What is asked of stored documents here: hashes, lengths, bytes and scores."""

    def __init__(self, lengths, hashes=(), scores=()):
        self.offsets = np.cumsum([0, *lengths])
        self.hashes = np.array(hashes, np.uint64)
        self.scores = np.array(scores, float)
        self.num_bytes = np.array(lengths, np.int64)

    def __len__(self):
        return len(self.num_bytes)


def selection(**options):
    return Selection(
        **{"held_out_share": None, "judged": np.empty(0, np.uint64), "repeated": None, "max_tokens": None, **options}
    )


def test_the_hash_of_a_text_decides_whether_it_is_held_out():
    documents = Documents([5, 5, 5], hashes=[0, 2**63, 2**64 - 1])
    half = selection(held_out_share=0.5)
    assert half.choose(documents, [0], 0).documents.tolist() == [1, 2] and half.held_out(documents, [0]).tolist() == [
        0
    ]


def test_a_document_longer_than_the_limit_is_trained_on_whatever_its_hash_is():
    documents = Documents([5, 50], hashes=[0, 1])
    limited = selection(held_out_share=0.5, longest_held_out=10)
    assert limited.held_out(documents, [0]).tolist() == [0] and limited.choose(
        documents, [0], 0
    ).documents.tolist() == [1]


@pytest.mark.parametrize(
    ("before", "taken", "is_end"), [(0, [0, 1], True), (5, [0], True), (20, [], True), (-5, [0, 1, 2], False)]
)
def test_a_limit_in_tokens_counts_what_came_before(before, taken, is_end):
    chosen = selection(max_tokens=10).choose(Documents([5, 5, 5], hashes=[1, 2, 3]), [0], before)
    assert (chosen.documents.tolist(), chosen.is_limit_reached) == (taken, is_end)
    assert chosen.left_out == ({"after max_tokens": 3 - len(taken)} if is_end else {})


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 10), st.integers(0, 9))
def test_the_parts_by_score_hold_each_document_once_in_order(lengths, sequence_length, seed):
    scores = np.random.default_rng(seed).integers(0, 9, len(lengths))
    documents = Documents(lengths, scores=scores)
    parts = [part_by_score(documents, np.arange(len(lengths)), part, sequence_length).tolist() for part in range(64)]
    order = [number for part in parts for number in part]
    assert sorted(order) == list(range(len(lengths))) and [scores[number] for number in order] == sorted(scores)
