import pickle

import numpy as np
import pytest

from cpt.data.rows.selection import CHUNK_TOKENS, near_duplicates, repeated_documents

WORDS = [f"word{number}" for number in range(3000)]


def prose(seed, words=120):
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


@pytest.fixture
def stored(tokenized, source):
    def run(texts):
        opened = tokenized(source("a", texts))
        return opened.documents(range(len(opened.plan.shards)))

    return run


def test_of_equal_documents_in_several_sources_that_of_the_first_stays(tokenized, source, tmp_path):
    sources = [tokenized(source("a", ["a", "b"])), tokenized(source("b", ["c", "a", "c"]))]
    first, second = repeated_documents(sources, "exact", tmp_path)
    assert first.of_shards([0])["exact duplicate"].tolist() == [False, False]
    assert second.of_shards([0])["exact duplicate"].tolist() == [False, True, True]
    assert first.name != second.name
    assert pickle.loads(pickle.dumps(second)).of_shards([0])["exact duplicate"].tolist() == [False, True, True]


def test_documents_that_share_half_of_their_text_both_stay(stored, tmp_path):
    texts = [f"{prose(0)} {prose(seed)}" for seed in range(1, 60)]
    assert not near_duplicates(stored(texts).parts, tmp_path).any()


def test_short_documents_are_compared_as_a_whole(stored, tmp_path):
    assert near_duplicates(stored(["a", "b", "ab", "ba", "a", "abc"]).parts, tmp_path).tolist() == [
        False,
        False,
        False,
        False,
        True,
        False,
    ]


def test_the_answer_does_not_depend_on_how_much_is_looked_at_at_once(stored, tmp_path, monkeypatch):
    store = stored([prose(seed % 7) + str(seed) for seed in range(30)])
    at_once = near_duplicates(store.parts, tmp_path)
    monkeypatch.setattr("cpt.data.rows.selection.CHUNK_TOKENS", CHUNK_TOKENS // 2000)
    assert near_duplicates(store.parts, tmp_path).tolist() == at_once.tolist() == [False] * 7 + [True] * 23
