import pytest
from tiny_documents import CONTAINER, PAGE, SENTENCE, chapter, write_docx, write_epub, write_zip

from cpt.data.documents import convert as markup
from cpt.data.documents.convert import NotConverted, convert_docx, convert_epub, convert_html

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
ENTITIES = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 9))
BILLION_LAUGHS = f'<!DOCTYPE html [<!ENTITY l0 "ha">{ENTITIES}]>'
DRM = (
    '<encryption xmlns:enc="http://www.w3.org/2001/04/xmlenc#"><enc:EncryptedData><enc:CipherData>'
    '<enc:CipherReference URI="{}"/></enc:CipherData></enc:EncryptedData></encryption>'
)


def html_text(page):
    return convert_html(page.encode()).text


def test_the_text_of_a_page_with_its_structure_and_title():
    page = convert_html(PAGE.encode())
    blocks = page.text.split("\n\n")
    assert page.title == "On catalysts" and blocks[0] == "# Catalysts" and blocks[2] == "## Kinds"
    assert (
        blocks[3] == "- homogeneous\n- heterogeneous"
        and blocks[-1] == "| Metal | Use |\n| --- | --- |\n| Nickel | Margarine |"
    )
    assert "Home" not in page.text and "cookies" not in page.text


@pytest.mark.parametrize(
    "html, expected",
    [
        ("<p>one\n  two</p><p>three</p>", "one two\n\nthree"),
        ("<div><div><h2>A <b>title</b></h2></div></div>text", "## A title\n\ntext"),
        ("<h3>Part<a class='headerlink' href='#p'>¶</a></h3>", "### Part"),
        ("<a href=x><h2>linked</h2></a>", "## linked"),
        ("<ul><li>a<ul><li>b</ul></ul>", "- a\n  - b"),
        ("<ol><li>a<li>b</ol>", "1. a\n2. b"),
        ("<pre><span>x</span> = 1\n\n  y = 2\n</pre>", "```\nx = 1\n\n  y = 2\n```"),
        ("<dl><dt>a<dd><pre>b\n  c</pre></dl>", "a\n\n```\nb\n  c\n```"),
        ("<blockquote><p>a</p></blockquote>", "> a"),
        ("a<script>no()</script><style>no</style><!-- no --> <i>b</i>", "a b"),
        ("<ruby>漢<rp>(</rp><rt>kan</rt><rp>)</rp></ruby>", "漢"),
        ("<p>日本\n  語と English\nwords</p>", "日本語と English words"),
        ("<p>2<sup>31</sup>, H<sub>2</sub>O, x<sub>i+1</sub>, see<sup>[4]</sup></p>", "2^31, H_2O, x_(i+1), see[4]"),
        ("<form><p>a page in a form</p><button>no</button></form>", "a page in a form"),
        ("<title>t</title><nav>only a menu</nav>", "only a menu"),
        ("<p>a<p>b<table><tr><td>c</p></div>\0", "a\n\nb"),
    ],
)
def test_how_html_is_written(html, expected):
    assert html_text(html)[: len(expected)] == expected
    assert html_text(html).count("\n") <= expected.count("\n") + 3


@pytest.mark.parametrize(
    "raw",
    [
        "naïve".encode(),
        b"\xef\xbb\xbf" + "naïve".encode(),
        "\ufeffnaïve".encode("utf-16-le"),
        "\ufeffnaïve".encode("utf-16-be"),
        '<meta charset="iso-8859-1">naïve'.encode("latin-1"),
        "<meta content='text/html; charset=latin1'>naïve".encode("latin-1"),
        '<?xml version="1.0" encoding="ISO-8859-1"?>naïve'.encode("latin-1"),
        "naïve “windows”".encode("cp1252"),
        '<meta charset="unknown-9">naïve'.encode(),
    ],
)
def test_the_encoding_of_a_page_is_found(raw):
    assert "naïve" in convert_html(raw).text


def test_headings_text_lists_and_tables_of_a_docx_in_their_order(tmp_path):
    document = convert_docx(write_docx(tmp_path / "a.docx").read_bytes())
    assert document.title == "On catalysts"
    assert document.text.split("\n\n") == [
        "# Catalysts",
        "## Kinds",
        SENTENCE,
        "- homogeneous\n- heterogeneous",
        "1. first\n2. second",
        "| Metal | Use |\n| --- | --- |\n| Nickel | Margarine |",
        "The end.",
    ]


def test_chapters_come_in_the_order_of_the_spine(tmp_path):
    chapters = {"1.xhtml": chapter("<h1>Second</h1><p>two</p>"), "2.xhtml": chapter("<h1>First</h1><p>one</p>")}
    book = convert_epub(write_epub(tmp_path / "a.epub", chapters).read_bytes())
    assert book.text == "# First\n\none\n\n# Second\n\ntwo" and book.title == "The book"


def test_a_book_with_rights_management_is_encrypted_and_one_with_hidden_fonts_is_not(tmp_path):
    chapters = {"1.xhtml": chapter("text")}
    for uri, is_read in (("OPS/text/1.xhtml", False), ("OPS/font.ttf", True)):
        raw = write_epub(tmp_path / "a.epub", chapters, {"META-INF/encryption.xml": DRM.format(uri)}).read_bytes()
        if is_read:
            assert convert_epub(raw).text == "text"
        else:
            with pytest.raises(NotConverted, match="encrypted"):
                convert_epub(raw)


@pytest.mark.parametrize(
    "files, reason",
    [
        ({"META-INF/container.xml": "<x/>"}, "damaged"),
        ({"META-INF/container.xml": CONTAINER.format("a.opf")}, "damaged"),
        ({"META-INF/container.xml": CONTAINER.format("a.opf"), "a.opf": "<package/>"}, "damaged"),
        ({"META-INF/container.xml": "<x"}, "damaged XML"),
        ({"META-INF/container.xml": f"{BILLION_LAUGHS}<x>&l8;</x>"}, "damaged"),
    ],
)
def test_a_damaged_book_has_a_reason(tmp_path, files, reason):
    with pytest.raises(NotConverted, match=reason):
        convert_epub(write_zip(tmp_path / "a.epub", files).read_bytes())


def test_a_zip_bomb_is_refused_before_anything_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(markup, "MAX_UNPACKED_BYTES", 10 * 2**20)
    bomb = {"OPS/bomb.css": bytes(11 * 2**20)}
    with pytest.raises(NotConverted, match="too large when unpacked"):
        convert_epub(write_epub(tmp_path / "a.epub", {"1.xhtml": chapter("text")}, bomb).read_bytes())
    images = {"OPS/image.png": bytes(11 * 2**20)}
    assert (
        convert_epub(write_epub(tmp_path / "a.epub", {"1.xhtml": chapter("text")}, images).read_bytes()).text == "text"
    )
