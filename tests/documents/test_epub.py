import pytest
from tiny_documents import CONTAINER, chapter, write_epub, write_zip

from cpt.documents.converted import NotConverted
from cpt.documents.epub import convert_epub

ENTITIES = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 9))
BILLION_LAUGHS = f'<!DOCTYPE html [<!ENTITY l0 "ha">{ENTITIES}]>'
DRM = (
    '<encryption xmlns:enc="http://www.w3.org/2001/04/xmlenc#"><enc:EncryptedData><enc:CipherData>'
    '<enc:CipherReference URI="{}"/></enc:CipherData></enc:EncryptedData></encryption>'
)


def test_chapters_come_in_the_order_of_the_spine(tmp_path):
    book = write_epub(
        tmp_path / "a.epub", {"1.xhtml": chapter("<h1>Second</h1><p>two</p>"), "2.xhtml": chapter("<h1>First</h1><p>one</p>")}
    )
    converted = convert_epub(book)
    assert converted.text == "# First\n\none\n\n# Second\n\ntwo" and converted.title == "The book"


def test_named_characters_and_empty_elements_are_understood(tmp_path):
    body = '<p>a&nbsp;&mdash;&nbsp;b &amp; c<a id="x"/></p><p>d</p>'
    assert convert_epub(write_epub(tmp_path / "a.epub", {"1.xhtml": chapter(body)})).text == "a — b & c\n\nd"


def test_a_chapter_that_is_no_xml_is_read_as_html(tmp_path):
    assert convert_epub(write_epub(tmp_path / "a.epub", {"1.xhtml": "<html><body><p>a<br>b<p>c"})).text == "a\nb\n\nc"


def test_names_of_files_may_be_escaped(tmp_path):
    book = write_epub(tmp_path / "a.epub", {"a%20b.xhtml": chapter("")}, {"OPS/text/a b.xhtml": chapter("text")})
    assert convert_epub(book).text == "text"


def test_entities_that_grow_are_not_expanded(tmp_path):
    book = write_epub(tmp_path / "a.epub", {"1.xhtml": chapter("<p>before &l8; after</p>", BILLION_LAUGHS)})
    text = convert_epub(book).text
    assert text.startswith("before") and text.endswith("after") and len(text) < 100


def test_a_book_with_rights_management_is_encrypted_and_one_with_hidden_fonts_is_not(tmp_path):
    chapters = {"1.xhtml": chapter("text")}
    with pytest.raises(NotConverted, match="encrypted"):
        convert_epub(write_epub(tmp_path / "a.epub", chapters, {"META-INF/encryption.xml": DRM.format("OPS/text/1.xhtml")}))
    assert convert_epub(write_epub(tmp_path / "b.epub", chapters, {"META-INF/encryption.xml": DRM.format("OPS/font.ttf")})).text == "text"


@pytest.mark.parametrize(
    "files, message",
    [
        ({"META-INF/container.xml": "<x/>"}, "names no package"),
        ({"META-INF/container.xml": CONTAINER.format("a.opf")}, "holds no `a.opf`"),
        ({"META-INF/container.xml": CONTAINER.format("a.opf"), "a.opf": "<package/>"}, "lists no chapters"),
        ({"META-INF/container.xml": "<x"}, "damaged XML"),
    ],
)
def test_a_damaged_book_says_what_is_missing(tmp_path, files, message):
    with pytest.raises(NotConverted, match=message):
        convert_epub(write_zip(tmp_path / "a.epub", files))
