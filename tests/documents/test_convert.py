import hashlib
import random

import pytest
from tiny_documents import PAGE, chapter, write_docx, write_epub, write_pdf

from cpt.documents.convert import FileConverter, name_of_converter, with_clean_text
from cpt.documents.converted import Converted, NotConverted

LIMITS = {"seconds": 20.0, "memory_bytes": 4 * 2**30}


def convert(path, known=frozenset()):
    return FileConverter(**LIMITS, known=known)(path)


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
def test_every_kind_becomes_a_document_with_its_title(files, kind):
    outcome = convert(files[kind])
    assert outcome.kind == kind and outcome.document is not None and outcome.document.text
    assert outcome.document.title == (None if kind == "txt" else "On catalysts")
    assert outcome.sha256 == hashlib.sha256(files[kind].read_bytes()).hexdigest() and outcome.size == files[kind].stat().st_size


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
    assert all((outcome.document is None) == (outcome.reason is not None) for outcome in outcomes)
    assert {outcome.reason for outcome in outcomes} - {None} and "took too long" not in {outcome.reason for outcome in outcomes}


def test_what_is_known_is_not_converted_again(files):
    known = convert(files["txt"], frozenset([convert(files["txt"]).sha256]))
    assert known.document is None and known.reason is None


def test_a_file_that_cannot_be_read_has_a_reason(tmp_path):
    outcome = convert(tmp_path / "gone.pdf")
    assert (outcome.reason, outcome.detail, outcome.sha256) == ("cannot be read", "No such file or directory", None)


def test_what_no_text_has_is_taken_out():
    document = with_clean_text(Converted("\n\na\0\x07b \ud800\ufeff\n\n\n\n  c\td\x1f\n", "t\0"))
    assert document.text == "ab\n\n  c\td" and document.title == "t"
    assert with_clean_text(Converted("a  \n\n\n b\xad\n"), tidy=False).text == "a  \n\n\n b\n"
    with pytest.raises(NotConverted, match="no text"):
        with_clean_text(Converted(" \n\0"))


def test_the_converter_is_named_with_its_version():
    assert name_of_converter("pdf").startswith("cpt 0.1") and ", pypdfium2 5" in name_of_converter("pdf")
    assert name_of_converter("txt") == name_of_converter("pdf").partition(",")[0]
