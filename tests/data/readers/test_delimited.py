import pytest

from cpt.data.documents import Document
from cpt.data.readers import delimited, lines


def test_csv_fields_may_hold_line_breaks_quotes_and_much_text(tmp_path, texts):
    long = "x" * 300_000
    (tmp_path / "a.csv").write_text(f'id,text\r\n1,"two\nlines, ""quoted"""\r\n\r\n2,{long}\r\n', newline="")
    assert texts(tmp_path / "a.csv") == ['two\nlines, "quoted"', long]


def test_tsv_is_separated_by_tabs(tmp_path, texts):
    (tmp_path / "a.tsv").write_text("id\tbody\n1\ta, b\n")
    assert texts(tmp_path / "a.tsv", text_column="body") == ["a, b"]


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
    assert (bad.where, bad.reason, bad.detail, bad.byte, bad.raw) == (f"{tmp_path}/a.csv:3", reason, detail, byte, row)
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


def test_an_open_quote_costs_the_lines_that_it_swallows_and_a_missing_column_the_file(tmp_path, bad):
    (tmp_path / "a.csv").write_text('id,text\n1,one\n2,"open\n3,three\n4,four\n')
    found = bad(tmp_path / "a.csv")
    assert (found.where, found.num_rows, found.raw) == (f"{tmp_path}/a.csv:3", 3, b'2,"open\n3,three\n4,four\n')
    (tmp_path / "a.csv").write_text("id,body\n" + "1,one\n" * 50)
    assert bad(tmp_path / "a.csv").num_rows == 50


def test_a_record_of_several_lines_is_named_by_its_first(tmp_path, read):
    (tmp_path / "a.csv").write_text('id,text\n1,"two\nlines"\n2,next\n')
    assert [item.where for item in read(tmp_path / "a.csv")] == [f"{tmp_path}/a.csv:2", f"{tmp_path}/a.csv:4"]


def test_an_open_quote_is_given_up_before_it_fills_the_memory(tmp_path, read, monkeypatch):
    monkeypatch.setattr(delimited, "LONGEST_RECORD", 2000)
    (tmp_path / "a.csv").write_text('id,text\n1,one\n2,"open\n' + "3,three\n" * 300 + "4,four\n")
    one, bad, *rest, last = read(tmp_path / "a.csv")
    assert (bad.where, bad.reason, bad.byte, bad.num_rows) == (
        f"{tmp_path}/a.csv:3",
        "not valid CSV",
        14,
        251,
    ) and len(bad.raw) == 1003
    assert (one.text, last.text, last.where) == ("one", "four", f"{tmp_path}/a.csv:304") and len(rest) == 50


def test_a_line_that_is_too_long_does_not_spoil_the_next(tmp_path, read, monkeypatch):
    monkeypatch.setattr(lines, "LONGEST_LINE", 2000)
    (tmp_path / "a.csv").write_text("id,text\n1,one\n2," + "x" * 3000 + "\n3,three\n")
    one, bad, last = read(tmp_path / "a.csv")
    assert (bad.where, bad.reason, bad.byte) == (f"{tmp_path}/a.csv:3", "too long", 14) and (one.text, last.text) == (
        "one",
        "three",
    )
