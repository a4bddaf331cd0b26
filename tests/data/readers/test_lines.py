import pytest

from cpt.data.readers import text_formats as lines
from cpt.data.readers.documents import Piece
from cpt.data.readers.text_formats import lines_of

CONTENT = (  # a byte order mark, CRLF, a blank line, U+2028, no end of line
    b"\xef\xbb\xbfone\r\n\ntwo \xe2\x80\xa8 still two\nthree"
)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "a.txt").write_bytes(CONTENT)
    return str(tmp_path / "a.txt")


def read(path, start, stop):
    return [line for _, _, line in lines_of(Piece(path, start, stop, 0))[1]]


@pytest.mark.parametrize("cut", range(1, len(CONTENT)))
def test_a_line_belongs_to_the_piece_in_which_it_begins(path, cut):
    assert read(path, 0, cut) + read(path, cut, None) == read(path, 0, None)


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000, 2999, 5000, 12_000])
def test_a_line_longer_than_pieces_is_one_line_of_the_first(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(lines, "LONGEST_LINE", 3000)
    content = b"first\n" + b"y" * 4000 + b"\nlast\n"
    (tmp_path / "a.txt").write_bytes(content)
    pieces = [
        Piece(str(tmp_path / "a.txt"), start, start + piece_bytes, 0) for start in range(0, len(content), piece_bytes)
    ]
    assert [at for piece in pieces for _, at, _ in lines_of(piece)[1]] == [0, 6, 4007]
