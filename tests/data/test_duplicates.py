import numpy as np
import pytest

from cpt.data.rows.selection import CHUNK_TOKENS, near_duplicates

WORDS = [f"word{number}" for number in range(3000)]


def prose(seed, words=120):
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


@pytest.fixture
def near(tokenized, source, tmp_path):
    """Which of these texts are dropped."""

    def dropped(texts):
        opened = tokenized(source("a", texts))
        parts = opened.documents(range(len(opened.plan.shards))).parts
        return near_duplicates(parts, tmp_path, [opened.work.encoder] * len(parts)).tolist()

    return dropped


def test_documents_that_share_half_of_their_text_both_stay(near):
    assert not any(near([f"{prose(0)} {prose(seed)}" for seed in range(1, 40)]))


def test_short_documents_are_compared_as_a_whole(near):
    assert near(["a", "b", "ab", "ba", "a", "abc"]) == [False] * 4 + [True, False]


def test_near_duplicates_do_not_depend_on_the_size_of_a_chunk(near, monkeypatch):
    texts = [prose(seed % 7) + str(seed) for seed in range(30)]
    in_one_chunk = near(texts)
    monkeypatch.setattr("cpt.data.rows.selection.CHUNK_TOKENS", CHUNK_TOKENS // 2000)
    assert near(texts) == in_one_chunk == [False] * 7 + [True] * 23
