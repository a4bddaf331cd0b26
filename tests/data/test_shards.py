from collections import Counter

import pytest

from cpt.data import shards
from cpt.data.documents import Document, Origin
from cpt.data.shards import View, batches, sample, shards_of
from cpt.recipe.schema import Source

KEY = "data.sources[0]"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three small files of lines and one of 250 bytes, with shards of 100."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 100)
    for name, size in {"a": 30, "b": 30, "c": 60, "d": 250}.items():
        (tmp_path / f"{name}.txt").write_text("123456789\n" * (size // 10))
    return Source(path=str(tmp_path), text_documents="line")


def test_small_files_share_a_shard_and_a_large_one_has_several(folder):
    made = shards_of(folder, KEY, is_file=True)
    names = [[piece.path[-5] for piece in shard] for shard in made.shards]
    assert names == [["a", "b"], ["c"], ["d"], ["d"], ["d"]] and made.num_bytes == [60, 60, 100, 100, 100]


def test_documents_that_are_counted_stay_in_one_shard(folder):
    made = shards_of(folder.model_copy(update={"max_documents": 5}), KEY, is_file=True)
    assert len(made.shards) == 1 and Counter(piece.path[-5] for piece in made.shards[0]) == {"a": 1, "b": 1, "c": 1, "d": 3}


def test_the_sample_reaches_to_the_end(folder):
    texts = sample(folder, shards_of(folder, KEY, is_file=True).shards, KEY)
    assert texts and set(texts) == {"123456789"}


def test_batches_keep_the_order_and_their_size(monkeypatch):
    monkeypatch.setattr(shards, "BATCH_CHARACTERS", 10)
    documents = [(text, Document(text, Origin("a", "line"), n)) for n, text in enumerate(["four", "fours", "x" * 30, "a", "b"], 1)]
    assert [[text for text, _ in batch] for batch in batches(iter(documents))] == [["four", "fours", "x" * 30], ["a", "b"]]


def test_a_filter_sees_text_source_and_place():
    view = View(Document("hello", Origin("a.jsonl", "line"), 3), "papers")
    assert dict(view) == {"text": "hello", "source": "papers", "where": "a.jsonl:3"}
    with pytest.raises(KeyError):
        view["title"]
