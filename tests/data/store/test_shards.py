import pytest

from cpt.data import plan
from cpt.data.documents import Document, Origin
from cpt.data.plan import plan_of
from cpt.data.sources import states_of
from cpt.data.store import shards
from cpt.data.store.shards import View, batches, sample
from cpt.recipe.schema import Source

KEY = "data.sources[0]"


def test_the_sample_reaches_to_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "SHARD_BYTES", 100)
    (tmp_path / "a.txt").write_text("".join(f"line {number:03}\n" for number in range(100)))
    lines = Source(path=str(tmp_path / "a.txt"), text_documents="line")
    texts = sample(lines, plan_of(lines, KEY, states_of(lines, KEY), window_bytes=None, seed=1).shards, KEY)
    assert {"line 000", "line 099"} <= set(texts)


def test_batches_keep_the_order_and_their_size(monkeypatch):
    monkeypatch.setattr(shards, "BATCH_CHARACTERS", 10)
    documents = [
        (text, Document(text, Origin("a", "line"), n))
        for n, text in enumerate(["four", "fours", "x" * 30, "a", "b"], 1)
    ]
    assert [[text for text, _ in batch] for batch in batches(iter(documents))] == [
        ["four", "fours", "x" * 30],
        ["a", "b"],
    ]


def test_a_filter_sees_text_source_and_place():
    view = View(Document("hello", Origin("a.jsonl", "line"), 3), "papers")
    assert dict(view) == {"text": "hello", "source": "papers", "where": "a.jsonl:3"}
    with pytest.raises(KeyError):
        view["title"]
