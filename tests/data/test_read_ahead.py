import json

import pytest

from cpt.errors import DataError


@pytest.fixture
def ahead(build, source, monkeypatch):
    """`ahead(cache="other")`: the rows of two sources, of about 17 and 8 shards."""
    monkeypatch.setattr("cpt.data.store.shards.SHARD_BYTES", 2_000)
    monkeypatch.setenv("CPT_WORKERS", "0")
    sizes = {"a": 1000, "b": 500}
    large = [
        source(name, [f"{name}{n:04}" + "x" * (n % 40) for n in range(size)])
        for name, size in sizes.items()
    ]

    def run(**options):
        return build(*large, **{"chunk_bytes": 6_000, **options})

    return run


def start(prepared, row=0):
    reader = prepared.read_ahead(row)
    reader.start()
    return reader


def all_rows(prepared, numbers):
    return [prepared.rows[row]["input_ids"].tolist() for row in numbers]


@pytest.mark.heavy
def test_everything_is_made_by_workers_while_the_run_reads(ahead, monkeypatch):
    straight = all_rows(ahead(cache="straight"), range(350))
    monkeypatch.setenv("CPT_WORKERS", "2")
    prepared = ahead()
    reader = start(prepared)
    assert all_rows(prepared, range(350)) == straight
    reader.thread.join(60)
    again = ahead()
    assert all(rows.is_complete for rows in again.chunked) and again.read_ahead(0) is None
    assert not any(report.is_estimate for report in again.sources)


@pytest.mark.heavy
def test_a_run_that_reads_ahead_resumes_exactly_where_it_was(ahead):
    straight = all_rows(ahead(cache="straight"), range(450))
    first = ahead()
    reader = start(first)
    assert all_rows(first, range(250)) == straight[:250]
    reader.stop()
    second = ahead(cache="empty")
    second.restore(json.loads(json.dumps(first.state(250))))
    reader = start(second, 250)
    assert all_rows(second, range(250, 450)) == straight[250:]
    reader.stop()


def test_an_error_ends_it_and_reaches_the_run(ahead, tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    path.write_text(path.read_text().replace('"a0990', '"a09\\u0000'))
    prepared = ahead()
    start(prepared).thread.join(60)
    assert "a.jsonl:991: a NUL byte" in caplog.text
    with pytest.raises(DataError, match="a.jsonl:991: a NUL byte"):
        all_rows(prepared, range(1000))
