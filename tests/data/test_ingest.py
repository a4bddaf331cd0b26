import json
import os

import numpy as np
import pytest

from cpt.data import ingest
from cpt.data.ingest import tokenize_source
from cpt.data.tokenization import DocumentEncoder
from cpt.errors import DataError
from cpt.recipe.schema import Component


@pytest.fixture
def tokenize(tokenizer, tmp_path):
    def run(source, *filters, tokenizer=tokenizer):
        return tokenize_source(source, {"data.filters": list(filters)}, DocumentEncoder(tokenizer), tmp_path / "cache", "data.sources[0]")

    return run


@pytest.fixture
def reads(monkeypatch):
    """How often a source was opened."""
    opened = []
    original = ingest.open_source
    monkeypatch.setattr(ingest, "open_source", lambda source, key: opened.append(key) or original(source, key))
    return opened


def decoded(store, tokenizer):
    return [tokenizer.decode(part[:-1]) for part in np.split(store.tokens, store.offsets[1:-1])]


def test_the_documents_are_stored_in_order_with_their_bytes(tokenize, source, tokenizer):
    store = tokenize(source("a", ["one", "twö", "one"]))
    assert decoded(store, tokenizer) == ["one", "twö", "one"]
    assert store.num_bytes.tolist() == [3, 4, 3]
    assert store.hashes[0] == store.hashes[2] != store.hashes[1]


def test_batches_do_not_change_what_is_stored(tokenize, source, tokenizer, monkeypatch):
    monkeypatch.setattr(ingest, "BATCH_CHARACTERS", 10)
    texts = [str(number) * (number % 30) or "-" for number in range(50)]
    assert decoded(tokenize(source("a", texts)), tokenizer) == texts


def test_dropped_documents_are_counted_by_reason(tokenize, source):
    store = tokenize(source("a", ["long enough", "no", "", "x", " \n"]), Component(name="length", min_characters=5))
    assert store.description.dropped == {"shorter than 5 characters": 2, "empty": 2}
    assert store.description.documents == 1


def test_a_source_with_nothing_left_gives_the_counts(tokenize, source):
    with pytest.raises(DataError, match=r"all 3 documents were dropped \(shorter than 9 characters: 2, empty: 1\).*data.filters"):
        tokenize(source("a", ["one", "", "two"]), Component(name="length", min_characters=9))


def test_the_second_time_nothing_is_read(tokenize, source, reads):
    first = source("a", ["one"])
    assert tokenize(first).folder == tokenize(first).folder
    assert len(reads) == 1


def test_what_could_change_the_tokens_makes_them_anew(tokenize, source, reads, tokenizer):
    first = source("a", ["one", "two"])
    folders = [tokenize(first).folder, tokenize(first, Component(name="length")).folder]
    folders += [tokenize(first, Component(name="length", min_characters=1)).folder]
    folders += [tokenize(first.model_copy(update={"max_documents": 1})).folder]
    grown = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eot>")
    folders += [tokenize(first, tokenizer=grown).folder]
    os.utime(first.path, ns=(1, 1))
    folders += [tokenize(first).folder]
    assert len(set(folders)) == len(reads) == 6


def test_a_changed_file_is_read_again(tokenize, source, tokenizer):
    tokenize(source("a", ["one"]))
    assert decoded(tokenize(source("a", ["six"])), tokenizer) == ["six"]


def test_a_changed_filter_of_the_users_reads_again(tokenize, source, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    mine, first = Component(name="my_changing_filter:check"), source("a", ["one", "two"])
    (tmp_path / "my_changing_filter.py").write_text("def check(document):\n    return None\n")
    assert tokenize(first, mine).description.documents == 2
    monkeypatch.delitem(__import__("sys").modules, "my_changing_filter")
    (tmp_path / "my_changing_filter.py").write_text("def check(document):\n    return 'two' if document['text'] == 'two' else None\n")
    assert tokenize(first, mine).description.documents == 1


def test_a_bad_row_leaves_no_store(tokenize, source, tmp_path):
    first = source("a", ["one"])
    with open(first.path, "a") as file:
        file.write("bad\n")
    with pytest.raises(DataError, match="a.jsonl:2: not valid JSON"):
        tokenize(first)
    assert not [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.suffix == ""]


def test_a_file_that_changes_while_it_is_read_is_refused(tokenize, source, tmp_path, monkeypatch):
    (tmp_path / "my_growing_filter.py").write_text(
        "def check(document):\n    with open(document['where'].rpartition(':')[0], 'a') as file:\n        file.write('\\n')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="files changed while they were being read"):
        tokenize(source("a", ["one"]), Component(name="my_growing_filter:check"))


def test_the_hashes_of_the_files_are_recorded(tokenize, source):
    first = source("a", ["one"])
    (recorded,) = tokenize(first).description.files.items()
    os.utime(first.path, ns=(1, 1))
    assert tokenize(first).description.files == dict([recorded])
    with open(first.path, "a") as file:
        file.write(json.dumps({"text": "two"}))
    assert tokenize(first).description.files.keys() == {recorded[0]} and tokenize(first).description.files[recorded[0]] != recorded[1]
