import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpt.data.duplicates import CHUNK_TOKENS, first_of_each, near_duplicates, repeated_documents, shingles
from cpt.data.ingest import tokenize_source
from cpt.data.tokenization import DocumentEncoder
from cpt.errors import ResourceError

WORDS = [f"word{number}" for number in range(3000)]


def prose(seed, words=120):
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


@pytest.fixture
def stored(tokenizer, source, tmp_path):
    def run(texts):
        return tokenize_source(source("a", texts), {}, DocumentEncoder(tokenizer), tmp_path / "cache", "data.sources[0]")

    return run


@given(st.lists(st.integers(0, 9)))
def test_the_first_of_equal_documents_stays(hashes):
    expected = [value not in hashes[:at] for at, value in enumerate(hashes)]
    assert first_of_each(np.array(hashes, np.uint64)).tolist() == expected


def test_equal_texts_are_left_out_and_others_not(stored, tmp_path):
    store = stored(["a", "b", "a", "a ", "b"])
    assert repeated_documents(store, "exact", tmp_path)["exact duplicate"].tolist() == [False, False, True, False, True]
    assert repeated_documents(store, None, tmp_path) == {}


def test_near_duplicates_are_left_out_and_others_not(stored, tmp_path):
    texts = [prose(1), prose(2), prose(1) + " and one more", prose(3), prose(2)[5:], prose(1)]
    found = repeated_documents(stored(texts), "near", tmp_path)
    assert found["exact duplicate"].tolist() == [False] * 5 + [True]
    assert found["near duplicate"].tolist() == [False, False, True, False, True, False]


def test_documents_that_share_half_of_their_text_both_stay(stored, tmp_path):
    texts = [f"{prose(0)} {prose(seed)}" for seed in range(1, 60)]
    assert not near_duplicates(stored(texts), tmp_path).any()


def test_short_documents_are_compared_as_a_whole(stored, tmp_path):
    assert near_duplicates(stored(["a", "b", "ab", "ba", "a", "abc"]), tmp_path).tolist() == [False, False, False, False, True, False]


def test_the_answer_does_not_depend_on_how_much_is_looked_at_at_once(stored, tmp_path, monkeypatch):
    store = stored([prose(seed % 7) + str(seed) for seed in range(30)])
    at_once = near_duplicates(store, tmp_path / "a")
    monkeypatch.setattr("cpt.data.duplicates.CHUNK_TOKENS", CHUNK_TOKENS // 2000)
    assert near_duplicates(store, tmp_path / "b").tolist() == at_once.tolist() == [False] * 7 + [True] * 23


def test_a_comparison_is_made_once(stored, tmp_path, monkeypatch):
    store = stored([prose(1), prose(1) + "."])
    assert near_duplicates(store, tmp_path).tolist() == [False, True]
    monkeypatch.setitem(sys.modules, "rensa", None)
    assert near_duplicates(store, tmp_path).tolist() == [False, True]


def test_without_the_library_the_install_line_is_told(stored, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(ResourceError, match=r"pip install 'cpt\[dedup\]'"):
        near_duplicates(stored(["a"]), tmp_path)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=8))
def test_shingles_are_the_runs_of_five_tokens_of_each_document(documents):
    offsets = np.cumsum([0, *map(len, documents)])
    hashes, bounds = shingles(np.array([token for tokens in documents for token in tokens], np.uint16), offsets)
    runs = [tuple(tokens[at : at + 5]) for tokens in documents for at in range(max(1, len(tokens) - 4))]
    assert bounds.tolist() == np.cumsum([0, *(max(1, len(tokens) - 4) for tokens in documents)]).tolist()
    assert len(set(zip(runs, hashes.tolist(), strict=True))) == len(set(runs)) == len(set(hashes.tolist()))
