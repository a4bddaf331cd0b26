import json
import pickle

import numpy as np

from cpt.data.store.tokenization import Gigatoken, why_not, without_special_tokens


def lengths_of_words(texts):
    """An encoder for the tests: the ids of a text are the lengths of its words."""
    ids = [[len(word) for word in text.split()] for text in texts]
    return np.array([number for one in ids for number in one]), np.array([len(one) for one in ids])


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
