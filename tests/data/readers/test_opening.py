import gzip
import json

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cpt.data.readers.documents import BadRow

ROWS = b"".join(json.dumps({"text": f"text {number} ö"}).encode() + b"\n" for number in range(5000))


def compressed(kind, content):
    return gzip.compress(content) if kind == "gz" else pa.Codec("zstd").compress(content, asbytes=True)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_files_give_what_is_in_them(tmp_path, texts, kind):
    (tmp_path / f"a.jsonl.{kind}").write_bytes(compressed(kind, ROWS[:30_000]) + compressed(kind, ROWS[30_000:]))
    (tmp_path / f"b.txt.{kind}").write_bytes(compressed(kind, "twö".encode()))
    (tmp_path / f"c.csv.{kind}").write_bytes(compressed(kind, b"text\nthree\n"))
    pq.write_table(pa.table({"text": ["four"]}), tmp_path / "d.parquet")
    (tmp_path / f"d.parquet.{kind}").write_bytes(compressed(kind, (tmp_path / "d.parquet").read_bytes()))
    (tmp_path / "d.parquet").unlink()
    assert texts(tmp_path) == [f"text {number} ö" for number in range(5000)] + ["twö", "three", "four"]


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_compressed_file_that_is_cut_off_gives_what_was_read_and_one_bad_row(tmp_path, read, kind):
    whole = compressed(kind, b"".join(ROWS + b"%d\n" % number for number in range(1)) * 40)
    (tmp_path / f"a.jsonl.{kind}").write_bytes(whole[: len(whole) * 3 // 4])
    *_, bad = read(tmp_path / f"a.jsonl.{kind}")
    assert isinstance(bad, BadRow) and bad.reason == "damaged file" and "cannot be read to its end" in bad.detail


def test_urls_are_read_like_files(tmp_path, texts):
    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/b.jsonl", b'{"text": "two"}\n')
    memory.pipe("/corpus/a.jsonl.gz", gzip.compress(b'{"text": "one"}\n'))
    pq.write_table(pa.table({"text": ["three"]}), tmp_path / "c.parquet")
    memory.pipe("/corpus/c.parquet", (tmp_path / "c.parquet").read_bytes())
    memory.pipe("/corpus/d.png", b"")
    assert texts("memory://corpus") == texts("memory://corpus/*.[jp][sa]*") == ["one", "two", "three"]
    assert texts("memory://corpus/b.jsonl") == ["two"]
