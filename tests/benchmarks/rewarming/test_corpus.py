import json

import pytest

from benchmarks.rewarming.corpus import TOKENIZER_BYTES, Text, read_texts, tokenizer_texts, write_library, write_own
from cpt.errors import DataError

PARAGRAPH = "A sentence of the {} that explains with care what number {} of it is good for, and when it is not. "


@pytest.fixture
def library(tmp_path):
    folder = tmp_path / "library"
    (folder / "pydoc_data").mkdir(parents=True)
    topics = {f"topic{i}": 3 * PARAGRAPH.format("reference", i) for i in range(40)}
    (folder / "pydoc_data" / "topics.py").write_text(f"topics = {topics!r}\n")
    for i in range(40):
        code = "\n".join(f"    value_{line} = compute({i}, {line})" for line in range(20))
        (folder / f"module{i}.py").write_text(f'"""{3 * PARAGRAPH.format("docstring", i)}"""\ndef work():\n{code}\n')
    return folder


def test_the_library_is_three_kinds_of_text_with_some_of_each_held_out(library, tmp_path):
    texts = write_library(library, tmp_path / "corpus")
    for kind, sign in {"general": "docstring", "weak": "reference", "strong": "value_1 ="}.items():
        train, held_out = list(read_texts(texts[kind].train)), list(read_texts(texts[kind].held_out))
        assert train and held_out and not set(train) & set(held_out)
        assert all(sign in text for text in train + held_out)


def test_a_python_without_its_reference_is_refused(library, tmp_path):
    (library / "pydoc_data" / "topics.py").unlink()
    with pytest.raises(DataError, match="language reference"):
        write_library(library, tmp_path / "corpus")


def test_a_text_of_ones_own_that_occurs_twice_is_not_on_both_sides(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i % 100}"}) + "\n" for i in range(200)))
    text = write_own({"german": path}, tmp_path / "corpus")["german"]
    train, held_out = list(read_texts(text.train)), list(read_texts(text.held_out))
    assert len(train) + len(held_out) == 100 and 3 <= len(held_out) <= 25
    assert not set(train) & set(held_out)


def test_too_few_documents_are_refused(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"text": "alone"}) + "\n")
    with pytest.raises(DataError, match="1 different documents"):
        write_own({"german": path}, tmp_path / "corpus")


def test_the_tokenizer_learns_from_training_text_of_every_kind(tmp_path):
    texts = {}
    for kind, length in {"general": TOKENIZER_BYTES // 2 + 1, "strong": 5}.items():
        texts[kind] = Text(tmp_path / f"{kind}.jsonl", tmp_path / "held_out.jsonl")
        texts[kind].train.write_text(2 * (json.dumps({"text": kind[0] * length}) + "\n"))
    assert [text[0] for text in tokenizer_texts(texts)] == ["g", "s", "s"], "no more than its share of a large text"
