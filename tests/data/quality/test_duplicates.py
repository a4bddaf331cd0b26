import pickle
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpt.data.quality.duplicates import CHUNK_TOKENS, first_of_each, near_duplicates, repeated_documents, shingles
from cpt.errors import ResourceError

WORDS = [f"word{number}" for number in range(3000)]


def prose(seed, words=120):
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


@pytest.fixture
def stored(tokenized, source):
    def run(texts, stem="a"):
        opened = tokenized(source(stem, texts))
        return opened.documents(range(len(opened.plan.shards)))

    return run


def found(documents, folder, deduplicate="near"):
    """By reason, of one source."""
    (repeated,) = repeated_documents([lambda verified: documents], deduplicate, folder)
    return {reason: which.tolist() for reason, which in repeated.of_shards([0]).items()}


@given(st.lists(st.integers(0, 9)))
def test_the_first_of_equal_documents_stays(hashes):
    expected = [value not in hashes[:at] for at, value in enumerate(hashes)]
    assert first_of_each(np.array(hashes, np.uint64)).tolist() == expected


def test_equal_texts_are_left_out_and_others_not(stored, tmp_path):
    store = stored(["a", "b", "a", "a ", "b"])
    assert found(store, tmp_path, "exact") == {"exact duplicate": [False, False, True, False, True]}


def test_of_equal_documents_in_several_sources_that_of_the_first_stays(stored, tmp_path):
    texts = {"a": ["a", "b"], "b": ["c", "a", "c"]}
    sources = [lambda verified, stem=stem: stored(texts[stem], stem) for stem in texts]
    first, second = repeated_documents(sources, "exact", tmp_path)
    assert first.of_shards([0])["exact duplicate"].tolist() == [False, False]
    assert second.of_shards([0])["exact duplicate"].tolist() == [False, True, True]
    assert first.name != second.name
    assert pickle.loads(pickle.dumps(second)).of_shards([0])["exact duplicate"].tolist() == [False, True, True]


def test_near_duplicates_are_left_out_and_others_not(stored, tmp_path):
    texts = [prose(1), prose(2), prose(1) + " and one more", prose(3), prose(2)[5:], prose(1)]
    assert found(stored(texts), tmp_path) == {
        "exact duplicate": [False] * 5 + [True],
        "near duplicate": [False, False, True, False, True, False],
    }


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
    monkeypatch.setattr("cpt.data.quality.duplicates.CHUNK_TOKENS", CHUNK_TOKENS // 2000)
    assert near_duplicates(store.parts, tmp_path).tolist() == at_once.tolist() == [False] * 7 + [True] * 23


def test_a_comparison_is_made_once(stored, tmp_path, monkeypatch):
    store = stored([prose(1), prose(1) + "."])
    first = found(store, tmp_path)
    monkeypatch.setitem(sys.modules, "rensa", None)
    assert found(store, tmp_path) == first and first["near duplicate"] == [False, True]


def test_without_the_library_the_install_line_is_told(stored, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(ResourceError, match=r"pip install 'cpt\[dedup\]'"):
        found(stored(["a"]), tmp_path)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=8))
def test_shingles_are_the_runs_of_five_tokens_of_each_document(documents):
    offsets = np.cumsum([0, *map(len, documents)])
    hashes, bounds = shingles(np.array([token for tokens in documents for token in tokens], np.uint16), offsets)
    runs = [tuple(tokens[at : at + 5]) for tokens in documents for at in range(max(1, len(tokens) - 4))]
    assert bounds.tolist() == np.cumsum([0, *(max(1, len(tokens) - 4) for tokens in documents)]).tolist()
    assert len(set(zip(runs, hashes.tolist(), strict=True))) == len(set(runs)) == len(set(hashes.tolist()))
