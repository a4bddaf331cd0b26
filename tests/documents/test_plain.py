import pytest

from cpt.documents.converted import NotConverted
from cpt.documents.plain import convert_plain


@pytest.mark.parametrize("raw", ["ä\nb".encode(), "\ufeffä\r\nb".encode(), "ä\rb".encode("utf-16")])
def test_text_is_passed_on_with_one_kind_of_line_end(tmp_path, raw):
    (tmp_path / "a.txt").write_bytes(raw)
    assert convert_plain(tmp_path / "a.txt").text == "ä\nb"


def test_the_first_heading_of_markdown_is_its_title(tmp_path):
    for name in ("a.md", "a.txt"):
        (tmp_path / name).write_text("\n# The title\n\ntext")
    assert convert_plain(tmp_path / "a.md").title == "The title" and convert_plain(tmp_path / "a.txt").title is None


@pytest.mark.parametrize("raw, reason", [(b"caf\xe9 au lait", "not UTF-8"), (b"a\0b", "not text")])
def test_what_is_no_text_is_told(tmp_path, raw, reason):
    (tmp_path / "a.txt").write_bytes(raw)
    with pytest.raises(NotConverted, match=reason):
        convert_plain(tmp_path / "a.txt")
