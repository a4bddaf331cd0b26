import gzip
import hashlib
import random

import pytest
from tiny_documents import PAGE, chapter, write_docx, write_epub, write_pdf

from cpt.data.documents.convert import Converted, NotConverted, convert_plain, with_clean_text
from cpt.data.documents.ingest import convert_file


def convert(path, known=frozenset()):
    return convert_file(20.0, known, path)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.html").write_text(PAGE)
    (tmp_path / "a.md").write_text("# On catalysts\n\ntext")
    (tmp_path / "a.txt").write_text("text")
    return {
        "pdf": write_pdf(tmp_path / "a.pdf", [["text"]], title="On catalysts"),
        "docx": write_docx(tmp_path / "a.docx"),
        "epub": write_epub(tmp_path / "a.epub", {"1.xhtml": chapter("text")}, title="On catalysts"),
        "html": tmp_path / "a.html",
        "md": tmp_path / "a.md",
        "txt": tmp_path / "a.txt",
    }


@pytest.mark.parametrize("kind", ["pdf", "docx", "epub", "html", "md", "txt"])
def test_every_kind_becomes_a_document_with_its_title_and_provenance(files, kind):
    entry, row = convert(files[kind])
    assert (
        entry.kind == kind == row["format"]
        and row["text"]
        and row["title"] == (None if kind == "txt" else "On catalysts")
    )
    assert entry.sha256 == row["sha256"] == hashlib.sha256(files[kind].read_bytes()).hexdigest()
    assert entry.size == files[kind].stat().st_size and row["converter"].startswith("cpt 0.1")
    assert ("pypdfium2 5" in row["converter"]) == (kind == "pdf") == ("pages" in row)


@pytest.mark.parametrize("kind", ["pdf", "html", "txt"])
def test_compressed_files_are_read(files, tmp_path, kind):
    packed = tmp_path / f"packed.{kind}.gz"
    packed.write_bytes(gzip.compress(files[kind].read_bytes()))
    assert convert(packed)[1]["text"] == convert(files[kind])[1]["text"]
    packed.write_bytes(packed.read_bytes()[:-9])
    assert convert(packed)[0].reason


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pdf", "docx", "epub", "html"])
def test_no_damage_to_a_file_is_more_than_a_reason(files, tmp_path, kind):
    draw, whole, outcomes = random.Random(kind), files[kind].read_bytes(), []
    for number in range(24):
        raw = bytearray(whole[: draw.randrange(1, len(whole))] if number % 3 == 0 else whole)
        for _ in range(draw.choice([1, 5, 50])):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        (tmp_path / f"damaged.{kind}").write_bytes(raw)
        outcomes.append(convert(tmp_path / f"damaged.{kind}"))
    assert all((row is None) == (entry.reason is not None) for entry, row in outcomes)
    assert {entry.reason for entry, _ in outcomes} - {None} and "took too long" not in {
        entry.reason for entry, _ in outcomes
    }


def test_what_no_text_has_is_taken_out():
    document = with_clean_text(Converted("\n\na\0\x07b \ud800\ufeff\n\n\n\n  c\td\x1f\n", "t\0"))
    assert document.text == "ab\n\n  c\td" and document.title == "t"
    assert with_clean_text(Converted("a  \n\n\n b\xad\n"), tidy=False).text == "a  \n\n\n b\n"
    with pytest.raises(NotConverted, match="no text"):
        with_clean_text(Converted(" \n\0"))


@pytest.mark.parametrize(
    "raw", ["ä\nb".encode(), "\ufeffä\r\nb".encode(), "ä\rb".encode("utf-16"), "ä\nb, in latin-1".encode("latin-1")]
)
def test_text_is_read_in_its_encoding_with_one_kind_of_line_end(raw):
    assert convert_plain(raw).text.startswith("ä\nb")
