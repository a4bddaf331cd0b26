import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from cpt.data import plan
from cpt.data.build import build_data
from cpt.data.store import claims
from cpt.data.store.shares import Share, make_share
from cpt.errors import DataError, RecipeError
from cpt.recipe.schema import Component, Data, Evaluation


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(plan, "SHARD_BYTES", 1_000)
    monkeypatch.setenv("CPT_WORKERS", "0")


@pytest.fixture
def data(source):
    texts = [f"document {number} " + "word " * (number % 30) for number in range(300)]
    return Data(
        sources=[source("a", texts), source("b", texts[:100])],
        sequence_length=64,
        window_bytes=8_000,
        filters=[Component(name="length", min_characters=3)],
    )


EVALUATION = Evaluation(held_out_share=0.05)


def files_of(cache: Path) -> dict[str, str]:
    """Every file of a store and its content's hash."""
    return {
        str(path.relative_to(cache)): xxh3_128_hexdigest(path.read_bytes())
        for path in cache.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def build(data, tokenizer, cache):
    return build_data(data, tokenizer, seed=1, evaluation=EVALUATION, cache_dir=cache, whole=True)


def share(data, tokenizer, cache, part, of=3):
    return make_share(data, tokenizer, Share(part, of), seed=1, evaluation=EVALUATION, cache_dir=cache)


def test_many_workers_make_each_shard_once_and_the_same_bytes_as_one(small_shards, data, tokenizer, tmp_path):
    straight = build(data, tokenizer, tmp_path / "one")
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda part: share(data, tokenizer, tmp_path / "many", part), (1, 2, 3)))
    assert sum(one.shards for one in done) == done[0].all_shards > 12
    assert 0 in {one.missing for one in done}, "somebody was the last"
    together = build(data, tokenizer, tmp_path / "many")
    assert together.fingerprint == straight.fingerprint
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")


def test_a_worker_begins_with_its_own_part_and_leaves_nothing_to_do(small_shards, data, tokenizer, tmp_path):
    first = share(data, tokenizer, tmp_path / "cache", 2)
    assert first.shards == first.all_shards and first.missing == 0, "nobody else came"
    assert share(data, tokenizer, tmp_path / "cache", 1).shards == 0


def test_what_a_killed_worker_began_is_made_by_whoever_comes(small_shards, data, tokenizer, tmp_path, monkeypatch):
    straight = build(data, tokenizer, tmp_path / "one")
    with claims.Claims("1/3") as held:  # of a worker that lives
        opened = next(iter(straight.windowed)).tokenized
        folder = tmp_path / "many" / "tokens" / opened.folder.name
        claim = folder / "claims" / opened.shard_folder(0).name
        held.take(claim)
        waiting = share(data, tokenizer, tmp_path / "many", 2)
        assert waiting.missing == 1 and waiting.shards == waiting.all_shards - 1
        held._held.clear()  # killed: nobody lets it go
    os.utime(claim, (time.time() - claims.DEAD_AFTER_SECONDS - 5,) * 2)
    assert share(data, tokenizer, tmp_path / "many", 3).shards == 1
    build(data, tokenizer, tmp_path / "many")
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")


def test_a_bad_row_is_told_by_the_worker_that_meets_it(small_shards, data, tokenizer, tmp_path):
    path = Path(data.sources[0].path)
    path.write_text(path.read_text().replace("document 250 ", "document \\\\u0000 "))
    path.write_text(path.read_text().replace("\\\\u0000", "\\u0000"))
    with pytest.raises(DataError, match="a.jsonl:251: a NUL byte"):
        share(data, tokenizer, tmp_path / "cache", 1)
    assert not list((tmp_path / "cache").rglob("claims/*")), "it lets go of what it could not make"


def test_a_bounded_store_is_not_shared_out(data, tokenizer, tmp_path):
    with pytest.raises(RecipeError, match="disk_bytes"):
        share(data.model_copy(update={"disk_bytes": 10**9}), tokenizer, tmp_path / "cache", 1)
