import pytest

from cpt.data.readers import documents
from cpt.data.readers.documents import BadRow, Document, Origin


@pytest.fixture
def five_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "COUNTED", {})
    (tmp_path / "a.jsonl").write_bytes(b"1\n22\n333\n4444\n55555\n")
    return str(tmp_path / "a.jsonl")


def test_a_place_is_told_as_its_unit_has_it(five_lines):
    assert Origin("a.txt", "document").where(1) == "a.txt"
    assert Origin("a.parquet", "row").where(17) == "a.parquet: row 17"
    assert Origin(five_lines, "line").where(3) == f"{five_lines}:3"


def test_a_line_of_a_later_piece_has_its_number_in_the_whole_file(five_lines):
    second_piece = Origin(five_lines, "line", start=5)  # begins with the third line
    assert Document("4444", second_piece, 2).where == BadRow("bad", "bad", second_piece, 2).where == f"{five_lines}:4"
