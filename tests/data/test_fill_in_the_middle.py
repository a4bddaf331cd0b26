import copy

import pytest

from cpt.data.examples.encoder import MARKS, MiddleEncoder
from cpt.data.store.tokenization import DocumentEncoder

PREFIX, SUFFIX, MIDDLE = MARKS[0]


@pytest.fixture(scope="module")
def coder(tokenizer):
    """The tokenizer of bytes with marks."""
    with_marks = copy.deepcopy(tokenizer)
    with_marks.add_tokens(list(MARKS[0]), special_tokens=True)
    return with_marks


def encoder(tokenizer, **options):
    return MiddleEncoder(DocumentEncoder(tokenizer), options, "data.sources[0]")


def test_marks_inside_a_text_stay_text(coder):
    text = f"say {PREFIX} and {MIDDLE}"
    ids, _ = encoder(coder, rate=1.0).encode([text])
    assert [sum(ids == coder.convert_tokens_to_ids(mark)) for mark in (PREFIX, MIDDLE)] == [1, 1]
