import pytest

from cpt.data.readers import text_formats as delimited
from cpt.data.readers.documents import Document


def test_csv_fields_may_hold_line_breaks_quotes_and_much_text(tmp_path, texts):
    long = "x" * 300_000
    (tmp_path / "a.csv").write_text(f'id,text\r\n1,"two\nlines, ""quoted"""\r\n\r\n2,{long}\r\n', newline="")
    assert texts(tmp_path / "a.csv") == ['two\nlines, "quoted"', long]


@pytest.mark.parametrize(
    "row, reason, detail, byte",
    [
        (b"2\n", "wrong number of fields", "1 fields, expected 2: id, text", 14),
        (b"2,two,three\n", "wrong number of fields", "3 fields, expected 2: id, text", 14),
        (b"2,caf\xe9\n", "invalid UTF-8", "invalid UTF-8 at byte 5 (0xe9)", 19),
        (b"2,a\0b\n", "NUL byte", "a NUL byte at byte 3: this is no text", 17),
        (b'2,"a"b\n', "not valid CSV", "not valid CSV (',' expected after '\"')", 14),
    ],
)
def test_a_bad_record_does_not_spoil_the_next(tmp_path, read, row, reason, detail, byte):
    (tmp_path / "a.csv").write_bytes(b"id,text\n1,one\n" + row + b"3,last\n")
    one, bad, last = read(tmp_path / "a.csv")
    assert (bad.where, bad.reason, bad.detail, bad.byte) == (f"{tmp_path}/a.csv:3", reason, detail, byte)
    assert isinstance(last, Document) and (one.text, last.text, last.where) == ("one", "last", f"{tmp_path}/a.csv:4")


@pytest.mark.parametrize(
    "content, where, reason",
    [
        (b'id,text\n1,"open\n', ":2", "not valid CSV"),
        (b"id,body\n1,one\n", ":1", "missing column"),
        (b"id,text\n", "", "no rows"),
    ],
)
def test_a_file_without_records_is_one_bad_row(tmp_path, bad, content, where, reason):
    (tmp_path / "a.csv").write_bytes(content)
    found = bad(tmp_path / "a.csv")
    assert (found.where, found.reason) == (f"{tmp_path}/a.csv{where}", reason)


def test_an_open_quote_is_given_up_before_it_fills_the_memory(tmp_path, read, monkeypatch):
    monkeypatch.setattr(delimited, "LONGEST_RECORD", 2000)
    (tmp_path / "a.csv").write_text('id,text\n1,one\n2,"open\n' + "3,three\n" * 300 + "4,four\n")
    one, bad, *rest, last = read(tmp_path / "a.csv")
    assert (bad.where, bad.reason, bad.byte, bad.num_rows) == (
        f"{tmp_path}/a.csv:3",
        "not valid CSV",
        14,
        251,
    )
    assert (one.text, last.text, last.where) == ("one", "four", f"{tmp_path}/a.csv:304") and len(rest) == 50
