import json
import time

import pytest

from cpt.cache import size_of
from cpt.data.rows.build import build_data
from cpt.recipe.schema import Data, Source

SHARD, WINDOW = 2_000, 8_000


@pytest.fixture
def large(tmp_path, monkeypatch):
    """Two sources of about 33 and 17 shards."""
    monkeypatch.setattr("cpt.data.store.shards.SHARD_BYTES", SHARD)
    monkeypatch.setenv("CPT_WORKERS", "2")
    for name, number in (("a", 2000), ("b", 1000)):
        lines = [json.dumps({"text": f"{name}{number:04}" + "x" * (number % 40)}) + "\n" for number in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return [Source(path=str(tmp_path / f"{name}.jsonl")) for name in "ab"]


@pytest.fixture
def build(tokenizer, tmp_path, large):
    def run(cache="cache", *, whole=False, **data):
        recipe = Data(**{"sources": large, "sequence_length": 64, "window_bytes": WINDOW, **data})
        return build_data(recipe, tokenizer, seed=1, cache_dir=tmp_path / cache, whole=whole)

    return run


def all_rows(prepared, numbers):
    return [prepared.rows[row]["input_ids"].tolist() for row in numbers]


def tokens_on_disk(tmp_path, cache="cache"):
    return sum(size_of(folder) for folder in (tmp_path / cache / "tokens").iterdir())


def test_all_is_made_while_the_run_reads(build, tmp_path):
    straight = all_rows(build("straight"), range(700))
    prepared = build()
    ahead = prepared.read_ahead(0)
    ahead.start()
    assert all_rows(prepared, range(700)) == straight
    ahead.thread.join(60)
    again = build()
    assert all(rows.is_complete for rows in again.windowed) and again.read_ahead(0) is None
    assert not any(report.is_estimate for report in again.sources)


def test_a_stopped_one_leaves_a_store_that_can_be_gone_on_with(build):
    prepared = build()
    ahead = prepared.read_ahead(0)
    ahead.start()
    ahead.stop()
    assert not ahead.thread.is_alive()
    assert all_rows(build(), range(0, 700, 50)) == all_rows(build("straight"), range(0, 700, 50))


@pytest.mark.slow
def test_a_bounded_disk_holds_no_more_than_it_may_and_the_rows_are_the_same(build, tmp_path):
    numbers = range(2200)  # more than twice through the smaller source
    straight = all_rows(build("straight"), numbers)
    limit = 120_000
    prepared = build(disk_bytes=limit)
    ahead = prepared.read_ahead(0)
    ahead.start()
    largest, rows = 0, []
    for number in numbers:
        rows.append(prepared.rows[number]["input_ids"].tolist())
        if number % 50 == 0:
            largest = max(largest, tokens_on_disk(tmp_path))
            time.sleep(0.1)
    ahead.stop()
    assert rows == straight
    everything = tokens_on_disk(tmp_path, "straight")
    assert largest < 1.25 * limit < 0.65 * everything, (largest, everything)


def test_a_bounded_run_goes_on_exactly_where_it_was(build, tmp_path):
    straight = all_rows(build("straight"), range(900))
    first = build(disk_bytes=120_000)
    ahead = first.read_ahead(0)
    ahead.start()
    assert all_rows(first, range(500)) == straight[:500]
    ahead.stop()
    state = json.loads(json.dumps(first.state(500)))
    second = build(disk_bytes=120_000)
    second.restore(state)
    ahead = second.read_ahead(500)
    ahead.start()
    assert all_rows(second, range(500, 900)) == straight[500:]
    ahead.stop()


def test_an_error_ends_it_and_the_reader_meets_it(build, large, tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    path.write_text(path.read_text().replace('"a1990', '"a19\\u0000'))
    prepared = build()
    ahead = prepared.read_ahead(0)
    ahead.start()
    ahead.thread.join(60)
    assert "Reading ahead ended" in caplog.text and "a.jsonl:1991: a NUL byte" in caplog.text
    with pytest.raises(Exception, match="a.jsonl:1991: a NUL byte"):
        all_rows(prepared, range(2000))
