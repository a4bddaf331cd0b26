import pytest

from cpt.data.documents import Piece
from cpt.data.readers.lines import lines_of

CONTENT = b"\xef\xbb\xbfone\r\n\ntwo \xe2\x80\xa8 still two\nthree"  # a byte order mark, CRLF, a blank line, U+2028, no end of line


@pytest.fixture
def path(tmp_path):
    (tmp_path / "a.txt").write_bytes(CONTENT)
    return str(tmp_path / "a.txt")


def read(path, start, stop):
    return [line for _, _, line in lines_of(Piece(path, start, stop, 0))[1]]


def test_lines_come_with_their_ends_and_without_the_byte_order_mark(path):
    assert read(path, 0, None) == [b"one\r\n", b"\n", "two \u2028 still two\n".encode(), b"three"]


@pytest.mark.parametrize("cut", range(1, len(CONTENT)))
def test_a_line_belongs_to_the_piece_in_which_it_begins(path, cut):
    assert read(path, 0, cut) + read(path, cut, None) == read(path, 0, None)


def test_each_line_knows_its_first_byte(path):
    for _, at, line in lines_of(Piece(path, 9, None, 0))[1]:
        assert CONTENT[at : at + len(line)] == line
