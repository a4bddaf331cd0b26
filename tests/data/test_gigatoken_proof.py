import json
import pickle

import numpy as np
import pytest

from cpt.data.gigatoken_proof import Gigatoken, first_difference, shortened, why_not, without_special_tokens


def lengths_of_words(texts):
    """An encoder for the tests: the ids of a text are the lengths of its words."""
    ids = [[len(word) for word in text.split()] for text in texts]
    return np.array([number for one in ids for number in one]), np.array([len(one) for one in ids])


def one_off_for_long_words(texts):
    ids, lengths = lengths_of_words(texts)
    return np.where(ids > 5, ids + 1, ids), lengths


def test_the_first_text_that_differs_is_named():
    texts = ["a bb", "ccc", "a longest word", "longest"]
    assert first_difference(texts, lengths_of_words, lengths_of_words) is None
    assert first_difference(texts, lengths_of_words, one_off_for_long_words) == "a longest word"


def test_documents_of_another_number_of_tokens_differ_too():
    def drops_the_last(texts):
        ids, lengths = lengths_of_words(texts)
        return ids[:-1], np.array([*lengths[:-1], lengths[-1] - 1])

    assert first_difference(["a b", "c d"], lengths_of_words, drops_the_last) == "c d"


def test_a_real_tokenizer_passes_the_proof_and_a_wrong_encoder_does_not(tokenizer):
    model = tokenizer.backend_tokenizer.to_str()
    right, copy = Gigatoken(model), pickle.loads(pickle.dumps(Gigatoken(model)))
    assert why_not(model, right, copy, ["a document"]) is None
    assert "its ids differ for" in str(why_not(model, right, lengths_of_words, ["a document"]))


def test_only_byte_level_bpe_is_tried(tokenizer):
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["model"]["type"] = "Unigram"
    assert "this is Unigram" in str(why_not(json.dumps(content), lengths_of_words, lengths_of_words, []))


def test_special_tokens_are_read_as_text(tokenizer):
    model = tokenizer.backend_tokenizer.to_str()
    assert json.loads(model)["added_tokens"] and json.loads(without_special_tokens(model))["added_tokens"] == []
    ids, lengths = Gigatoken(model)(["<|endoftext|>"])
    assert len(ids) == lengths[0] == len("<|endoftext|>") and 256 not in ids


@pytest.mark.parametrize(("text", "shown"), [("short", "short"), ("x" * 200, "x" * 60 + " ...")])
def test_a_long_text_is_shortened_for_the_log(text, shown):
    assert shortened(text) == shown
