import copy
from importlib import metadata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from cpt.data.examples.encoder import MARKS, MiddleEncoder
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import RecipeError

EOS = 256


def documents(encoder, texts):
    ids, lengths = encoder.encode(texts)
    return [part.tolist() for part in np.split(ids, lengths.cumsum()[:-1])]


@given(
    st.lists(
        st.text() | st.sampled_from(["<|endoftext|>", "x <pad>", "<|endof"]), min_size=1, max_size=5
    )
)
def test_no_text_ends_a_document_and_none_is_changed(tokenizer, texts):
    for text, ids in zip(texts, documents(DocumentEncoder(tokenizer), texts), strict=True):
        assert ids.count(EOS) == 1 and tokenizer.decode(ids[:-1]) == text


def test_a_special_token_that_is_vocabulary_too_is_spelled_in_pieces():
    """SentencePiece's Unigram finds `</s>` in text, whatever the tokenizer's settings."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((character, -3.0) for character in "</s>ab")]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.Unigram(pieces, unk_id=0)),
        eos_token="</s>",
        unk_token="<unk>",
    )
    (ids,) = documents(DocumentEncoder(tokenizer), ["a</s>bx"])
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "<", "/", "s", ">", "b", "<unk>", "</s>"]


def test_an_unknown_token_that_is_the_eos_ends_no_document(tokenizer):
    like_gpt2 = copy.deepcopy(tokenizer)
    like_gpt2.unk_token = "<|endoftext|>"
    assert documents(DocumentEncoder(like_gpt2), ["a<|endoftext|>"])[0].count(EOS) == 1
    words = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="<eos>"))
    ambiguous = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", unk_token="<eos>"
    )
    with pytest.raises(RecipeError, match="distinguished"):
        DocumentEncoder(ambiguous).encode(["unknown"])


def test_added_words_that_are_not_special_are_found(tokenizer):
    grown = copy.deepcopy(tokenizer)
    grown.add_tokens(["benzene"])
    assert (
        grown.convert_tokens_to_ids("benzene")
        in documents(DocumentEncoder(grown), ["a benzene ring"])[0]
    )


def test_the_users_tokenizer_keeps_its_settings(tokenizer):
    mine = copy.deepcopy(tokenizer)
    mine.backend_tokenizer.enable_truncation(4)
    before = mine("ab<|endoftext|>cdefg")["input_ids"]
    assert len(documents(DocumentEncoder(mine), ["abcdefg"])[0]) == 8
    assert mine("ab<|endoftext|>cdefg")["input_ids"] == before


def test_special_tokens_of_fill_in_the_middle_inside_a_text_stay_text(tokenizer):
    coder, (prefix, _, middle) = copy.deepcopy(tokenizer), MARKS[0]
    coder.add_tokens(list(MARKS[0]), special_tokens=True)
    ids, _ = MiddleEncoder(DocumentEncoder(coder), {"rate": 1.0}, "k").encode(
        [f"say {prefix} and {middle}"]
    )
    assert [sum(ids == coder.convert_tokens_to_ids(mark)) for mark in (prefix, middle)] == [1, 1]


def test_a_tokenizer_in_plain_python_follows_the_same_rules():
    tokenizer = ByT5Tokenizer()
    (ids,) = documents(DocumentEncoder(tokenizer), ["a</s>b"])
    assert ids.count(tokenizer.eos_token_id) == 1 and tokenizer.decode(ids[:-1]) == "a</s>b"


def test_the_fingerprint_follows_what_the_tokenizer_does(tokenizer):
    other = copy.deepcopy(tokenizer)
    assert DocumentEncoder(other).fingerprint == DocumentEncoder(tokenizer).fingerprint
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert DocumentEncoder(other).fingerprint != DocumentEncoder(tokenizer).fingerprint


@pytest.fixture(scope="module")
def encoders(tokenizer_folder):
    """The same tokenizer, trained on words, by Hugging Face and by gigatoken."""
    slowly = DocumentEncoder(AutoTokenizer.from_pretrained(tokenizer_folder))
    fast = slowly.proven_for(["the model reads", "a document"])
    assert (slowly.engine.split()[0], fast.engine.split()[0]) == ("tokenizers", "gigatoken")
    return slowly, fast


hard_text = st.text(st.characters(codec="utf-8"), max_size=60) | st.text(
    "ab \n\t\r's12.,<|>end\u0301\u3000\x00", max_size=80
)


@given(
    st.lists(
        hard_text | st.sampled_from(["<|endoftext|>", "a<pad>b", "<|im_start|>", "<|endof"]),
        max_size=8,
    )
)
def test_gigatoken_gives_the_ids_of_hugging_face(encoders, texts):
    slowly, fast = (documents(encoder, texts) for encoder in encoders)
    assert fast == slowly


@pytest.fixture
def grown(tokenizer):
    """gigatoken finds the added `word` inside other words too, where Hugging Face's tokenizer needs a whole one."""
    made = copy.deepcopy(tokenizer)
    made.add_tokens([AddedToken("word", single_word=True)])
    return made


def test_a_tokenizer_that_gigatoken_reads_otherwise_stays_with_hugging_face(grown, caplog):
    caplog.set_level("INFO", "cpt")
    assert DocumentEncoder(grown).proven_for(["no such thing here"]).engine.startswith("tokenizers")
    assert "gigatoken" in caplog.text and "'awordb'" in caplog.text


def test_a_difference_in_the_runs_own_documents_is_enough(grown, monkeypatch):
    monkeypatch.setattr("cpt.data.store.tokenization.HARD_STRINGS", [])
    monkeypatch.setattr("cpt.data.store.tokenization.around_added_tokens", lambda content: [])
    assert DocumentEncoder(grown).proven_for(["nothing"]).engine.startswith("gigatoken")
    assert (
        DocumentEncoder(grown)
        .proven_for(["nothing", "a swordfish"])
        .engine.startswith("tokenizers")
    )


def test_without_gigatoken_hugging_faces_tokenizer_does_the_work(tokenizer, monkeypatch, caplog):
    caplog.set_level("INFO", "cpt")

    def version(package):
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", version)
    assert DocumentEncoder(tokenizer).proven_for(["a"]).engine.startswith("tokenizers")
    assert "pip install gigatoken" in caplog.text
