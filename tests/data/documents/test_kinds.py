import pytest
from tiny_documents import PAGE, chapter, write_docx, write_epub, write_pdf

from cpt.data.documents.convert import NotConverted, kind_of
from cpt.data.documents.ingest import find_documents
from cpt.errors import DataError


@pytest.fixture
def library(tmp_path):
    folder = tmp_path / "library"
    for name in ("sub/deep", ".git"):
        (folder / name).mkdir(parents=True)
    write_pdf(folder / "b.pdf", [["text"]])
    write_pdf(folder / "sub/no_suffix", [["text"]])
    (folder / "a.txt").write_text("text")
    (folder / "sub/deep/page.HTM").write_text(PAGE)
    for name in ("sub/picture.png", ".git/hidden.txt", "sub/.hidden.md", "sub/photo.png"):
        (folder / name).write_bytes(b"\x89PNG")
    return folder


def test_a_folder_is_searched_for_documents_by_suffix(library, tmp_path):
    (library / "c.txt.gz").touch()
    (library / "d.yaml.gz").touch()
    files, others = find_documents([library], tmp_path / "out")
    assert [str(file.relative_to(library)) for file in files] == [
        "a.txt",
        "b.pdf",
        "c.txt.gz",
        "sub/deep/page.HTM",
    ]
    assert others == {".png": 2, ".yaml": 1, "no suffix": 1}


@pytest.mark.parametrize("given", ["", "sub"])
def test_a_folder_in_the_output_folder_is_refused_where_a_file_that_is_named_is_not(library, given):
    assert find_documents([library / "a.txt"], library)[0]
    with pytest.raises(DataError, match="in the output folder"):
        find_documents([library / given], library)


def test_the_content_says_what_a_file_is_and_else_its_suffix(tmp_path):
    write_pdf(tmp_path / "a.txt", [["text"]])
    write_docx(tmp_path / "b.pdf")
    write_epub(tmp_path / "c.zip", {"1.xhtml": chapter("text")})
    (tmp_path / "d.md").write_text("\ufeff <!-- saved -->\n<!DOCTYPE html><html>")
    (tmp_path / "e.html").write_text("<p>a part of a page")
    (tmp_path / "f.txt").write_text("<p> is a paragraph in HTML")
    (tmp_path / "g.txt").write_text("<html>", encoding="utf-16")
    kinds = [kind_of(file.read_bytes(), file.name) for file in sorted(tmp_path.iterdir())]
    assert kinds == ["pdf", "docx", "epub", "html", "html", "txt", "html"]


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("a.pdf", b"", "empty file"),
        ("a.pdf", b"no PDF", "not what its suffix says"),
        ("a.docx", b"no zip", "not what its suffix says"),
        ("a.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "encrypted or old Office file"),
        ("a.epub", b"PK\x03\x04 cut off", "damaged zip"),
        ("a.png", b"\x89PNG", "unknown kind"),
    ],
)
def test_what_is_no_document_has_a_reason(name, content, reason):
    with pytest.raises(NotConverted) as raised:
        kind_of(content, name)
    assert raised.value.reason == reason
