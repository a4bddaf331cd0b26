"""Bad rows are kept with their content, so that they can be mended and read again."""

import base64
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cpt.cli import main
from cpt.data.readers.account import MOST_CONTENT, Losses
from cpt.data.readers.documents import LONGEST_CONTENT, BadRow, Origin, content_fields, row_as_json


def table(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_mended_rows_are_read_as_another_source(tmp_path, tokenized, read):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"\n{"txt": "three"}\n')
    with pytest.raises(SystemExit):
        main(["data", "check", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "bad.jsonl")])
    bad = [
        json.loads(line)["content"] for line in (tmp_path / "bad.jsonl").read_text().splitlines()
    ]
    assert bad == ['{"text": "two"', '{"txt": "three"}']
    mended = f"{bad[0]}}}\n{bad[1].replace('txt', 'text')}\n"
    (tmp_path / "mended.jsonl").write_text(mended)
    assert [document.text for document in read(tmp_path / "mended.jsonl")] == ["two", "three"]


@pytest.mark.parametrize(
    ("name", "content", "kept"),
    [
        ("a.jsonl", b"\n{broken\r\n", {"content": "{broken"}),
        ("a.jsonl", b'{"text": "\xe9"}\n', {"content_base64": b'{"text": "\xe9"}\n'}),
        ("a.json", b'[{"text": "x"}, {"text": 3}]', {"content": '{"text": 3}'}),
        ("a.json", b'[{"text": "x"}, 3]', {"content": "3"}),
        ("a.csv", b'text,n\nx,1\n"y\nz",2,3\n', {"content": '"y\nz",2,3'}),
        ("a.parquet", [{"text": "x"}, {"text": None}], {"content": '{"text": null}'}),
    ],
)
def test_each_format_keeps_its_bad_rows(tmp_path, bad, name, content, kept):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        table(path, content)
    fields = content_fields(bad(path).content)
    if "content_base64" in fields:
        fields["content_base64"] = base64.b64decode(fields["content_base64"])
    assert fields == kept


def test_a_long_row_is_cut_between_characters():
    fields = content_fields(b"x" + "\u00f6".encode() * LONGEST_CONTENT)
    assert fields["content_is_cut"]
    assert len(fields["content"].encode()) == LONGEST_CONTENT - 1


def test_many_bad_rows_do_not_fill_the_memory():
    losses = Losses()
    for number in range(100):
        losses.drop_row(BadRow("null", "", Origin("a", "row"), number, content=b"x" * 10**5), "key")
    kept = [row for row in losses.bad_rows if "content" in row]
    assert len(losses.bad_rows) == 100 and len(kept) * 10**5 <= MOST_CONTENT


def test_a_row_whose_keys_json_does_not_know_keeps_its_other_fields():
    row = {("a", 1): "left", b"b": 2, "text": None, 3: {"x", "y"} - {"y"}}
    assert json.loads(row_as_json(row)) == {"text": None, "3": "{'x'}"}
