import pytest
from tiny_tokenizers import CODE, KINDS, ids_of

from cpt.tokenizer.extend_vocabulary import read_bpe


@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_of_the_words_are_the_ids_of_the_text(kind):
    tokenizer = KINDS[kind]()
    bpe = read_bpe(tokenizer)
    for text in CODE:
        pieces = [token.id for word in bpe.split(text) for token in bpe.backend.model.tokenize(word)]
        assert pieces == ids_of(tokenizer, text)


@pytest.mark.parametrize(
    ("token", "may_be"),
    [
        ("▁value", True),
        ("values", True),
        ("▁▁▁▁", True),
        (".(", True),
        ("▁2", True),
        ("24", False),
        ("x(", False),
        ("a▁b", False),
        ("▁▁a", False),
    ],
)
def test_a_sentencepiece_token_is_letters_or_signs_or_one_digit_of_one_word(token, may_be):
    assert read_bpe(KINDS["llama2"]()).may_be_token(token) is may_be
