import zipfile

import docx
import pytest
from tiny_documents import SENTENCE, write_docx, write_zip

from cpt.documents.converted import NotConverted
from cpt.documents.word import convert_docx

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def with_body(path, body, prologue=""):
    """A document whose body is this XML."""
    write_docx(path)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files["word/document.xml"] = f'<?xml version="1.0"?>{prologue}<w:document xmlns:w="{W}"><w:body>{body}</w:body></w:document>'
    return write_zip(path, files)


def test_headings_text_lists_and_tables_in_their_order(tmp_path):
    document = convert_docx(write_docx(tmp_path / "a.docx"))
    assert document.title == "On catalysts"
    assert document.text.split("\n\n") == [
        "# Catalysts",
        "## Kinds",
        SENTENCE,
        "- homogeneous\n- heterogeneous\n1. first\n2. second",
        "| Metal | Use |\n| --- | --- |\n| Nickel | Margarine |",
        "The end.",
    ]


def test_inserted_text_is_read_and_deleted_text_is_not(tmp_path):
    body = (
        "<w:p><w:r><w:t>kept </w:t></w:r><w:ins><w:r><w:t>added</w:t></w:r></w:ins>"
        "<w:del><w:r><w:delText>gone</w:delText></w:r></w:del></w:p>"
        "<w:sdt><w:sdtContent><w:p><w:r><w:t>in a control</w:t></w:r></w:p></w:sdtContent></w:sdt>"
        "<w:p><w:r><w:t>a</w:t><w:br/><w:t>b</w:t><w:tab/><w:t>c</w:t></w:r></w:p>"
    )
    assert convert_docx(with_body(tmp_path / "a.docx", body)).text == "kept added\n\nin a control\n\na\nb\tc"


def test_entities_that_grow_are_not_expanded(tmp_path):
    entities = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 9))
    body = "<w:p><w:r><w:t>&l8;</w:t></w:r></w:p><w:p><w:r><w:t>text</w:t></w:r></w:p>"
    try:
        text = convert_docx(with_body(tmp_path / "a.docx", body, f'<!DOCTYPE x [<!ENTITY l0 "ha">{entities}]>')).text
    except NotConverted:
        return
    assert len(text) < 100


def test_a_deeper_list_stands_further_in(tmp_path):
    document = docx.Document()
    for text, style in (("a", "List Bullet"), ("b", "List Bullet")):
        document.add_paragraph(text, style=style)
    level = document.paragraphs[1]._p.get_or_add_pPr().get_or_add_numPr()
    level.get_or_add_numId().val = 1
    level.get_or_add_ilvl().val = 1
    document.save(str(tmp_path / "a.docx"))
    assert convert_docx(tmp_path / "a.docx").text == "- a\n  - b"


@pytest.mark.parametrize("missing", ["word/document.xml", "[Content_Types].xml", "_rels/.rels"])
def test_a_document_that_lacks_a_part_is_damaged(tmp_path, missing):
    write_docx(tmp_path / "a.docx")
    with zipfile.ZipFile(tmp_path / "a.docx") as archive:
        files = {name: archive.read(name) for name in archive.namelist() if name != missing}
    with pytest.raises(NotConverted, match="damaged"):
        convert_docx(write_zip(tmp_path / "a.docx", files))
