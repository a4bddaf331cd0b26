import pytest

from cpt.data.open_sources import open_source
from cpt.data.store import plan
from cpt.data.store.tokenization import DocumentEncoder
from cpt.data.store.tokenized import make_shards
from cpt.recipe.schema import Data


@pytest.fixture
def two(source, tokenizer, tmp_path, monkeypatch):
    """Two sources of several shards, nothing of which is there."""
    monkeypatch.setattr(plan, "SHARD_BYTES", 500)
    sources = [source(name, [f"{name} {number}" for number in range(100)]) for name in "ab"]
    data = Data(sources=sources)
    return [
        open_source(data, one, f"data.sources[{n}]", DocumentEncoder(tokenizer), tmp_path / "c", 1)
        for n, one in enumerate(sources)
    ]


def everything(sources):
    return [(source, number) for source in sources for number in range(len(source.plan.shards))]


def test_what_is_there_is_not_made_again(two):
    make_shards(everything(two))
    before = {path: path.stat().st_ino for source in two for path in source.folder.rglob("*.bin")}
    make_shards(everything(two))
    assert before == {path: path.stat().st_ino for source in two for path in source.folder.rglob("*.bin")}
