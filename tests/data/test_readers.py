import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cpt.data.readers import READERS, read_csv, read_document, read_jsonl, read_parquet
from cpt.errors import DataError
from cpt.recipe.sense import DOCUMENT_FILES

GOOD = b'{"text": "one"}\n'
BAD_LINES = {
    "malformed": (b'{"text": "two\n', "not valid JSON"),
    "cut off at the end": (b'{"text": "tw', "not valid JSON"),
    "NUL bytes": (b"\0\0\0\0\n", "not valid JSON|NUL"),
    "lone surrogate": (b'{"text": "\\ud800"}\n', "lone surrogate"),
    "invalid UTF-8": (b'{"text": "caf\xe9!"}\n', r"invalid UTF-8 at byte 13 \(0xe9\)"),
    "missing column": (b'{"content": "two", "url": "x"}\n', "no column `text`. It has: content, url.*data.sources.0..text_column"),
    "null": (b'{"text": null}\n', "`text` is null, expected a string"),
    "number": (b'{"text": 7}\n', "`text` is a number, expected a string"),
    "list": (b'["two"]\n', "a list, expected a JSON object"),
    "two objects": (b'{"text": "a"}{"text": "b"}\n', "not valid JSON"),
}


def texts(reader, path, column="text"):
    return [text for _, text in reader(path, column, "data.sources[0]")]


@pytest.mark.parametrize("line, message", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_jsonl_row_names_file_line_and_key(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"\n" + line)
    with pytest.raises(DataError, match=message) as error:
        texts(read_jsonl, path)
    assert f"{path}:3: " in str(error.value)
    assert "data.sources[0]" in str(error.value)
    assert "\n" not in str(error.value)


def test_rows_before_a_bad_one_have_their_line_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD)
    assert [where for where, _ in read_jsonl(path, "text", "k")] == [f"{path}:1", f"{path}:3"]


def test_blank_lines_crlf_bom_and_a_missing_last_newline_are_fine(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n   \n{"text": "tw\xc3\xb6", "n": [1]}')
    assert texts(read_jsonl, path) == ["one", "twö"]


def test_only_blank_lines_are_no_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="a.jsonl: no rows"):
        texts(read_jsonl, tmp_path / "a.jsonl")


def test_a_document_file_keeps_its_text_to_the_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf one\r\n\n two \n")
    assert texts(read_document, tmp_path / "a.txt") == [" one\r\n\n two \n"]


def test_a_document_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(gzip.compress(b"text"))
    with pytest.raises(DataError, match=r"a.txt: invalid UTF-8 at byte 1 \(0x8b\)"):
        texts(read_document, tmp_path / "a.txt")
    (tmp_path / "b.txt").write_bytes("text".encode("utf-16-be"))
    with pytest.raises(DataError, match="b.txt: a NUL byte at byte 0"):
        texts(read_document, tmp_path / "b.txt")


def test_csv_fields_may_hold_line_breaks_quotes_and_much_text(tmp_path):
    long = "x" * 300_000
    (tmp_path / "a.csv").write_text(f'id,text\r\n1,"two\nlines, ""quoted"""\r\n\r\n2,{long}\r\n', newline="")
    assert texts(read_csv, tmp_path / "a.csv") == ['two\nlines, "quoted"', long]


def test_tsv_is_separated_by_tabs(tmp_path):
    (tmp_path / "a.tsv").write_text("id\tbody\n1\ta, b\n")
    assert texts(read_csv, tmp_path / "a.tsv", "body") == ["a, b"]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"id,text\n1,one\n2\n", "a.csv:3: 1 fields, expected 2: id, text"),
        (b"id,text\n1,one\n2,two,three\n", "a.csv:3: 3 fields"),
        (b"id,text\n1,caf\xe9\n", "a.csv:2: invalid UTF-8 at byte 5"),
        (b'id,text\n1,"open\n', "a.csv:2: not valid CSV"),
        (b"id,body\n1,one\n", "a.csv:1: no column `text`. It has: id, body"),
        (b"id,text\n", "a.csv: a header and no rows"),
    ],
)
def test_a_bad_csv_row_names_file_and_line(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts(read_csv, tmp_path / "a.csv")


def write_parquet(path, column, name="text"):
    pq.write_table(pa.table({name: column}), path)
    return path


def test_parquet_of_any_string_type_is_read(tmp_path):
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        assert texts(read_parquet, write_parquet(tmp_path / "a.parquet", pa.array(["one", "twö"], pa.string()).cast(kind))) == [
            "one",
            "twö",
        ]


@pytest.mark.parametrize(
    "column, message",
    [
        (["one", None], "a.parquet: row 2: `text` is null"),
        ([1, 2], "a.parquet: row 1: `text` is a number"),
        ([b"one"], "a.parquet: row 1: `text` is of type bytes"),
        (pa.array([], pa.string()), "a.parquet: a parquet file without rows"),
    ],
)
def test_a_bad_parquet_row_is_named(tmp_path, column, message):
    with pytest.raises(DataError, match=message):
        texts(read_parquet, write_parquet(tmp_path / "a.parquet", column))


def test_parquet_with_invalid_utf8_names_the_row(tmp_path):
    column = pa.Array.from_buffers(pa.string(), 2, pa.array(["ok", "ab"]).buffers()[:2] + [pa.py_buffer(b"ok\xff\xfe")])
    with pytest.raises(DataError, match="row 2: invalid UTF-8 at byte 0"):
        texts(read_parquet, write_parquet(tmp_path / "a.parquet", column))


def test_a_parquet_file_without_the_column_lists_those_it_has(tmp_path):
    with pytest.raises(DataError, match="no column `text`. It has: body"):
        texts(read_parquet, write_parquet(tmp_path / "a.parquet", ["x"], "body"))


def test_what_is_no_parquet_is_said_in_one_line(tmp_path):
    whole = write_parquet(tmp_path / "a.parquet", ["one"] * 1000).read_bytes()
    for content in (b"no parquet at all", whole[: len(whole) // 2]):
        (tmp_path / "b.parquet").write_bytes(content)
        with pytest.raises(DataError, match="b.parquet: cannot be read as parquet") as error:
            texts(read_parquet, tmp_path / "b.parquet")
        assert "\n" not in str(error.value)


def test_the_sense_gate_knows_the_same_files():
    assert set(READERS) == DOCUMENT_FILES
