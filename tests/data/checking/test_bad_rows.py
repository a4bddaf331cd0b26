import base64
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cpt.data.checking.bad_rows import absurd_share, apply_policy, count_reasons, refuse_too_many, write_bad_rows
from cpt.data.sources import pieces_of, read_piece
from cpt.errors import DataError
from cpt.recipe.schema import Source

GOOD = b'{"text": "good"}\n'
INVALID = pa.Array.from_buffers(pa.string(), 2, pa.array(["ok", "ab"]).buffers()[:2] + [pa.py_buffer(b"ok\xff\xfe")])
CUT_OFF_GZ = gzip.compress(
    b"".join(json.dumps({"text": "%x" % (number**7)}).encode() + b"\n" for number in range(20_000))
)[:-10_000]


def parquet(column, name="text"):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({name: column}), sink)
    return sink.getvalue().to_pybytes()


KINDS = {  # what is wrong -> (suffix, content of the file, where, reason)
    "malformed": ("jsonl", GOOD + b'{"text": two}\n' + GOOD, ":2", "not valid JSON"),
    "truncated last line": ("jsonl", GOOD + GOOD + b'{"text": "tw', ":3", "cut off"),
    "two objects in a line": ("jsonl", GOOD + b'{"text": "a"}{"text": "b"}\n' + GOOD, ":2", "not valid JSON"),
    "NUL bytes": ("jsonl", GOOD + b"\0\0\0\0\n" + GOOD, ":2", "NUL byte"),
    "NUL in the text": ("jsonl", GOOD + b'{"text": "a\\u0000"}\n' + GOOD, ":2", "NUL byte"),
    "lone surrogate": ("jsonl", GOOD + b'{"text": "\\ud800"}\n' + GOOD, ":2", "lone surrogate"),
    "invalid UTF-8": ("jsonl", GOOD + b'{"text": "caf\xe9!"}\n' + GOOD, ":2", "invalid UTF-8"),
    "null": ("jsonl", GOOD + b'{"text": null}\n' + GOOD, ":2", "null"),
    "number": ("jsonl", GOOD + b'{"text": 7}\n' + GOOD, ":2", "wrong type"),
    "list of texts": ("jsonl", GOOD + b'{"text": ["a"]}\n' + GOOD, ":2", "wrong type"),
    "missing column": ("jsonl", GOOD + b'{"content": "two", "url": "x"}\n' + GOOD, ":2", "missing column"),
    "no object": ("jsonl", GOOD + b'["two"]\n' + GOOD, ":2", "not an object"),
    "NaN": ("jsonl", GOOD + b'{"text": "two", "score": NaN}\n' + GOOD, ":2", "NaN or Infinity"),
    "-Infinity": ("jsonl", GOOD + b'{"text": "two", "score": -Infinity}\n' + GOOD, ":2", "NaN or Infinity"),
    "empty file": ("jsonl", b"", "", "empty file"),
    "only blank lines": ("jsonl", b"\n\r\n  \n", ":1", "no rows"),
    "gz cut off": ("jsonl.gz", CUT_OFF_GZ, "", "damaged file"),
    "no gz": ("jsonl.gz", GOOD, "", "damaged file"),
    "no zst": ("txt.zst", GOOD, "", "damaged file"),
    "text in another encoding": ("txt", "grüße".encode("latin-1"), "", "invalid UTF-8"),
    "text in UTF-16": ("txt", "text".encode("utf-16"), "", "UTF-16"),
    "a binary file": ("txt", b"PK\0\0", "", "NUL byte"),
    "csv with a field too few": ("csv", b"id,text\n1,one\n2\n3,three\n", ":3", "wrong number of fields"),
    "csv with an open quote": ("csv", b'id,text\n1,one\n2,"open\n', ":3", "not valid CSV"),
    "csv with invalid UTF-8": ("csv", b"id,text\n1,one\n2,caf\xe9\n3,three\n", ":3", "invalid UTF-8"),
    "csv without the column": ("csv", b"id,body\n1,one\n", ":1", "missing column"),
    "parquet with a null": ("parquet", parquet(["one", None]), ": row 2", "null"),
    "parquet of numbers": ("parquet", parquet([1]), ": row 1", "wrong type"),
    "parquet with invalid UTF-8": ("parquet", parquet(INVALID), ": row 2", "invalid UTF-8"),
    "parquet without the column": ("parquet", parquet(["one"], "body"), "", "missing column"),
    "parquet cut off": ("parquet", parquet(["one"] * 100)[:-40], "", "damaged file"),
    "no arrow": ("arrow", b"nothing", "", "damaged file"),
    "json cut off": ("json", b'[{"text": "one"},', "", "cut off"),
    "json of numbers": ("json", b'[{"text": "one"}, 2]', ": item 2", "not an object"),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def case(request, tmp_path):
    suffix, content, where, reason = request.param
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(content)
    source = Source(path=str(path))
    return (
        [item for piece in pieces_of(source, "k") for item in read_piece(source, piece, "k")],
        f"{path}{where}",
        reason,
    )


def test_the_policy_error_stops_and_names_the_place(case):
    items, where, _ = case
    with pytest.raises(DataError) as error:
        list(apply_policy(items, "error", "data.sources[0]", []))
    message = str(error.value)
    assert message.startswith(f"{where}: ") and "data.sources[0]" in message and "\n" not in message


def test_the_policy_skip_keeps_the_others_and_lists_the_place(case):
    items, where, reason = case
    found = []
    documents = list(apply_policy(items, "skip", "k", found))
    assert len(documents) == len(items) - 1 and len(found) == 1
    assert (found[0]["where"], found[0]["reason"]) == (where, reason) and not {"raw", "raw_base64"} & set(found[0])


def test_the_policy_quarantine_keeps_the_row_itself(case, tmp_path):
    items, where, reason = case
    found = []
    list(apply_policy(items, "quarantine", "k", found))
    write_bad_rows(found, tmp_path)
    (row,) = map(json.loads, (tmp_path / "bad_rows.jsonl").read_text().splitlines())
    (bad,) = [item for item in items if not hasattr(item, "text")]
    raw = base64.b64decode(row["raw_base64"]) if "raw_base64" in row else row["raw"].encode() if "raw" in row else None
    assert row["where"] == where and row["reason"] == reason and raw == bad.raw
    assert raw is not None or ":" not in where.removeprefix(str(tmp_path)) or reason == "no rows"


def test_what_is_fine_is_no_bad_row(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD + b'\r\n{"text": ""}\r\n{"text": "x", "n": 1e5}')
    source = Source(path=str(tmp_path))
    found = []
    items = [item for piece in pieces_of(source, "k") for item in read_piece(source, piece, "k")]
    assert [document.text for document in apply_policy(items, "skip", "k", found)] == ["good", "", "x"] and found == []


def bad(rows, reason="null"):
    return {"where": "a.jsonl:7", "byte": 1, "reason": reason, "detail": "`text` is null", "rows": rows}


def test_too_many_bad_rows_stop_after_all_and_show_the_first():
    refuse_too_many(1, 999, 0.001, "corpus", "k", [bad(1)])
    with pytest.raises(
        DataError,
        match=r"corpus: 2 of 1,000 rows are bad \(0.20%\).*\(0.10%\). The first: a.jsonl:7: `text` is null; a",
    ) as error:
        refuse_too_many(2, 998, 0.001, "corpus", "k", [bad(1), bad(1)])
    assert "cpt data check" in str(error.value)
    with pytest.raises(DataError):  # the rows of a lost file count
        refuse_too_many(500, 500, 0.4, "corpus", "k", [bad(500)])
    refuse_too_many(0, 0, 0, "corpus", "k", [])


def test_reasons_are_counted_by_rows():
    assert count_reasons([bad(1), bad(4), bad(1, "cut off")]) == {"null": 5, "cut off": 1}


def test_a_document_that_is_most_of_a_source_is_told_with_its_address():
    assert "b: one of 1,000 documents (a.jsonl:7) makes up 30% of the tokens." in absurd_share(
        "b", "a.jsonl:7", 300, 1000, 1000
    )
    assert (
        absurd_share("b", "a.jsonl:7", 200, 1000, 1000) is None and absurd_share("b", "a.txt", 1000, 1000, 1) is None
    )
