import copy
from importlib import metadata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
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


@pytest.fixture
def of_words():
    """`of_words({"a": 7})`: a tokenizer with these words and ids, `</s>` 1 and `<s>` 2."""

    def make(words, *, adds_bos=False, **options):
        backend = Tokenizer(models.WordLevel({"?": 0, "</s>": 1, "<s>": 2, **words}, unk_token="?"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        if adds_bos:
            backend.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", 2)]
            )
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", **options)

    return make


def test_each_document_is_between_the_tokens_that_its_tokenizer_adds(of_words):
    words = {"a": 7, "b": 8}
    texts = ["a b", "", "b", "a x a"]
    plain = documents(DocumentEncoder(of_words(words, bos_token="<s>")), texts)
    assert plain == [[7, 8, 1], [1], [8, 1], [7, 0, 7, 1]]
    encoder = DocumentEncoder(of_words(words, bos_token="<s>", adds_bos=True))
    assert documents(encoder, texts) == [[2, *document] for document in plain]
    assert documents(encoder, []) == [[]]
    ids, lengths = encoder.text_ids(texts)
    offsets = np.array([0, *lengths.cumsum()])
    assert encoder.decode_documents(ids, offsets) == ["a b", "", "b", "a ? a"]
    slow = DocumentEncoder(ByT5Tokenizer())
    ids, lengths = slow.encode(["one", "", "three"])
    assert slow.decode_documents(ids, np.array([0, *lengths.cumsum()])) == ["one", "", "three"]
    assert slow.text_loss(["one"]) is None
    assert encoder.bytes_learned(["a", "éa"], [b"a", "éa".encode()]).tolist() == [1, 3]


@pytest.mark.parametrize(("largest", "size"), [(2**16 - 1, 2), (2**16, 4)])
def test_ids_take_as_many_bytes_as_the_vocabulary_needs(of_words, largest, size):
    encoder = DocumentEncoder(of_words({"a": largest}))
    assert encoder.dtype.itemsize == size and encoder.encode(["a a"])[0].tolist() == [
        largest,
        largest,
        1,
    ]


def test_padding_is_that_of_the_tokenizer_or_the_end_of_a_document(of_words):
    assert DocumentEncoder(of_words({"a": 7})).pad == 1
    assert DocumentEncoder(of_words({"a": 7}, pad_token="a")).pad == 7
    with_template = of_words({"a": 7})
    for template in ("{{ x }}", {"default": "{{ x }}", "other": ""}):
        with_template.chat_template = template
        assert DocumentEncoder(with_template).chat_template == "{{ x }}"


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
