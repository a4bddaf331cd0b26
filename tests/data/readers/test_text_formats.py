import io

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpt.data.readers import formats as text_formats
from cpt.data.readers.documents import Document, Piece
from cpt.data.readers.formats import lines_of


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000, 2999, 5000, 12_000])
def test_a_line_longer_than_pieces_is_one_line_of_the_first(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(text_formats, "LONGEST_LINE", 3000)
    content = b"first\n" + b"y" * 4000 + b"\nlast\n"
    (tmp_path / "a.txt").write_bytes(content)
    pieces = [
        Piece(str(tmp_path / "a.txt"), start, start + piece_bytes) for start in range(0, len(content), piece_bytes)
    ]
    assert [at for piece in pieces for _, at, _ in lines_of(piece)[1]] == [0, 6, 4007]


GOOD = b'{"text": "one"}\n'


def test_blank_lines_crlf_bom_and_a_missing_last_newline_are_fine(tmp_path, texts):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n   \n{"text": "tw\xc3\xb6", "n": [1]}')
    assert texts(tmp_path / "a.jsonl") == ["one", "twö"]


@pytest.mark.parametrize(
    "line, byte",
    [
        (b'{"text": "caf\xe9!"}\n', 17 + 13),
        (b'{"text": "\xc3\xb6", x}\n', 17 + 15),
        (b'{"other": 1}\n', 17),
        (b"NaN\n", 17),
    ],
    ids=["invalid UTF-8", "not JSON", "missing column", "NaN"],
)
def test_a_bad_row_knows_its_byte_in_the_file_and_its_line(tmp_path, bad, line, byte):
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"\n" + line + GOOD)
    found = bad(tmp_path / "a.jsonl")
    assert (found.where, found.byte) == (f"{tmp_path}/a.jsonl:3", byte)


def test_a_line_that_is_too_long_is_a_bad_row_and_does_not_spoil_the_next(tmp_path, read, monkeypatch):
    monkeypatch.setattr(text_formats, "LONGEST_LINE", 5000)
    (tmp_path / "a.jsonl").write_bytes(GOOD + b'{"text": "a"}' + b" " * 6000 + b"x\n" + GOOD)
    one, bad, last = read(tmp_path / "a.jsonl")
    assert (bad.where, bad.reason, bad.byte) == (f"{tmp_path}/a.jsonl:2", "too long", 16)
    assert (one.text, last.text, last.where) == ("one", "one", f"{tmp_path}/a.jsonl:3")


@pytest.mark.parametrize(
    "content, expected",
    [
        ('[{"text": "one"}, {"text": "two"}]', ["one", "two"]),
        ('{\n "text": "one"\n}\n', ["one"]),
        ('{"text": "one"}\n{"text": "two"}\n', ["one", "two"]),
    ],
    ids=["a list", "one object", "jsonl in disguise"],
)
def test_json_of_any_shape_is_read(tmp_path, texts, content, expected):
    (tmp_path / "a.json").write_text(content)
    assert texts(tmp_path / "a.json") == expected


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
    monkeypatch.setattr(text_formats, "LONGEST_RECORD", 2000)
    (tmp_path / "a.csv").write_text('id,text\n1,one\n2,"open\n' + "3,three\n" * 300 + "4,four\n")
    one, bad, *rest, last = read(tmp_path / "a.csv")
    assert (bad.where, bad.reason, bad.byte, bad.num_rows) == (
        f"{tmp_path}/a.csv:3",
        "not valid CSV",
        14,
        251,
    )
    assert (one.text, last.text, last.where) == ("one", "four", f"{tmp_path}/a.csv:304") and len(rest) == 50


PARTS = st.lists(st.sampled_from([b"", b"a", b"-", b"--", b"---", b"ab-", b"long " * 5]), max_size=30)


@given(PARTS, st.integers(1, 9), st.booleans())
@settings(max_examples=200)
def test_parts_are_what_split_gives_wherever_the_buffer_ends(parts, buffer, bom):
    content = b"\xef\xbb\xbf" * bom + b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_formats, "BUFFER", buffer)
        found = list(text_formats.split(io.BytesIO(content), b"--"))
    assert [part for _, part in found] == content.removeprefix(b"\xef\xbb\xbf").split(b"--")
    assert all(content[at:].removeprefix(b"\xef\xbb\xbf").startswith(part) for at, part in found)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(1, 25))
@example([20, 0], 1)
def test_a_part_that_is_too_long_does_not_spoil_the_next(lengths, buffer):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"BUFFER": buffer, "LONGEST_LINE": 20}.items():
            patch.setattr(text_formats, name, value)
        found = list(text_formats.split(io.BytesIO(b"--".join(b"x" * length for length in lengths)), b"--"))
    assert [part for _, part in found] == [b"x" * length if length <= 20 else b"..." for length in lengths]
    assert [at for at, _ in found] == [sum(lengths[:number]) + 2 * number for number in range(len(lengths))]
