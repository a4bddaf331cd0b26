import pytest

from cpt.data.readers import text_formats as lines

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
    monkeypatch.setattr(lines, "LONGEST_LINE", 5000)
    (tmp_path / "a.jsonl").write_bytes(GOOD + b'{"text": "a"}' + b" " * 6000 + b"x\n" + GOOD)
    one, bad, last = read(tmp_path / "a.jsonl")
    assert (bad.where, bad.reason, bad.byte) == (f"{tmp_path}/a.jsonl:2", "too long", 16)
    assert (one.text, last.text, last.where) == ("one", "one", f"{tmp_path}/a.jsonl:3")
