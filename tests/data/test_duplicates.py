import numpy as np
import pytest

from cpt.data.rows.selection import CHUNK_TOKENS, near_duplicates, shingles

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


def test_documents_at_the_limit_of_likeness_are_near_duplicates(near, monkeypatch):
    monkeypatch.setattr("cpt.data.rows.selection.LIKENESS", 1.0)
    assert near(["ab" * 20, "ab" * 31, "ac" * 20, "ab" * 20 + "c"]) == [False, True, False, False]


def test_each_run_of_tokens_has_a_hash_of_its_own():
    draws = np.random.default_rng(0).integers(0, 300, 60_000).tolist()
    documents = [[7], [7, 0, 0, 0], [7, 0, 0, 0, 0], [0] * 6, [7, 0, 0, 0, 0, 1, 2], draws]
    ends = np.cumsum([0, *map(len, documents)])
    hashes, bounds = shingles(np.concatenate(documents).astype(np.uint16), ends)
    runs = []
    for document in documents:
        count = max(1, len(document) - 4)
        runs += [tuple(document[first : first + 5]) for first in range(count)]
    assert bounds.tolist() == [0, 1, 2, 3, 5, 8, 8 + 60_000 - 4]
    assert len(hashes) == len(runs)
    different = set(zip(runs, hashes.tolist(), strict=True))
    assert len(set(runs)) == len(set(hashes.tolist())) == len(different)


def test_near_duplicates_do_not_depend_on_the_size_of_a_chunk(near, monkeypatch):
    texts = [prose(seed % 7) + str(seed) for seed in range(30)]
    in_one_chunk = near(texts)
    monkeypatch.setattr("cpt.data.rows.selection.CHUNK_TOKENS", CHUNK_TOKENS // 2000)
    assert near(texts) == in_one_chunk == [False] * 7 + [True] * 23
