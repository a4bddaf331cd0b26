import copy

import pytest

from cpt.data.examples.encoders import MARKS, MiddleEncoder
from cpt.data.store.tokenization import DocumentEncoder

TEXTS = [f"def function_{number}(argument):\n    return argument + {number}\n" for number in range(300)]
PREFIX, SUFFIX, MIDDLE = MARKS[0]


@pytest.fixture(scope="module")
def coder(tokenizer):
    """The tokenizer of bytes with marks."""
    with_marks = copy.deepcopy(tokenizer)
    with_marks.add_tokens(list(MARKS[0]), special_tokens=True)
    return with_marks


def encoder(tokenizer, **options):
    return MiddleEncoder(DocumentEncoder(tokenizer), options, "data.sources[0]")


def written(coder, texts, **options):
    ids, lengths = encoder(coder, **options).encode(texts)
    ends = lengths.cumsum()
    return [coder.decode(ids[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def test_rates_are_kept(coder):
    documents = written(coder, TEXTS, rate=0.4, suffix_first_rate=0.25)
    cut = [document for document in documents if PREFIX in document]
    assert 0.3 < len(cut) / 300 < 0.5
    assert 0.15 < sum(document.startswith(PREFIX + SUFFIX) for document in cut) / len(cut) < 0.35
    assert all(document.count("<|endoftext|>") == 1 for document in documents)


def test_marks_inside_a_text_stay_text(coder):
    text = f"say {PREFIX} and {MIDDLE}"
    ids, _ = encoder(coder, rate=1.0).encode([text])
    assert [sum(ids == coder.convert_tokens_to_ids(mark)) for mark in (PREFIX, MIDDLE)] == [1, 1]
