"""Who reads a file otherwise is refused, whichever reader it is; real files: test_gguf_families.py and
test_gguf_tokenizer.py."""

import pytest
from transformers import AutoTokenizer

from cpt.checkpoints.proof import ProofText
from cpt.errors import CheckpointError
from cpt.exporting.gguf_proof import ids_of, logits_read_back, refuse_other, refuse_other_tokens


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_tokens(["<kinase>"])
    return tokenizer


class Reader:
    """llama.cpp's part in it: text to tokens, as the function says."""

    def __init__(self, tokens):
        self.tokens = tokens


def text_of(tokenizer, text="the model reads a document"):
    return ProofText(text, ids_of(tokenizer, text))


def test_a_reader_with_the_same_tokens_passes(tokenizer):
    assert (
        refuse_other_tokens(Reader(lambda text: ids_of(tokenizer, text)), tokenizer, text_of(tokenizer))
        == "the same tokens"
    )


def test_a_space_after_an_added_token_is_told(tokenizer):
    def spaced(text):
        before, added, after = text.partition("<kinase>")
        return [*ids_of(tokenizer, before + added), *(ids_of(tokenizer, " " + after) if added else [])]

    def as_if_new(text):
        return ids_of(tokenizer, text)

    def begins_anew(text):
        start, token, rest = text.partition("two")
        return (
            [*ids_of(tokenizer, start), *ids_of(tokenizer, token), *ids_of(tokenizer, rest)]
            if token
            else as_if_new(text)
        )

    assert "the same tokens" in refuse_other_tokens(Reader(begins_anew), tokenizer, text_of(tokenizer))
    with pytest.raises(CheckpointError, match="llama.cpp reads 'one<kinase>two' as other tokens"):
        refuse_other_tokens(Reader(spaced), tokenizer, text_of(tokenizer))


def test_the_first_token_that_differs_is_named():
    refuse_other([1, 2, 3], [1, 2, 3], "abc")
    with pytest.raises(CheckpointError, match=r"\[9, 3\] from number 1 on, not \[2, 3\]"):
        refuse_other([1, 9, 3], [1, 2, 3], "abc")
    with pytest.raises(CheckpointError, match=r"\[\] from number 2 on, not \[3\]"):
        refuse_other([1, 2], [1, 2, 3], "abc")


def test_a_file_that_transformers_cannot_read_is_refused_with_the_reason(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(
        CheckpointError, match="plain transformers, in a process without cpt, cannot read model.gguf: "
    ):
        logits_read_back(tmp_path / "model.gguf", ProofText("abc", [1, 2, 3]))
