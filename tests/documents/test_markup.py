import zipfile

import docx
import pytest
from tiny_documents import CONTAINER, PAGE, SENTENCE, chapter, write_docx, write_epub, write_zip

from cpt.documents import markup
from cpt.documents.kinds import NotConverted
from cpt.documents.markup import convert_docx, convert_epub, convert_html

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


def test_pages_nested_without_end_or_without_elements_end():
    assert html_text("<div>" * 50_000 + "text") in ("text", "") and not html_text("<!-- -->")


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


def with_body(path, body, prologue=""):
    """A DOCX whose body is this XML."""
    write_docx(path)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files["word/document.xml"] = (
        f'<?xml version="1.0"?>{prologue}<w:document xmlns:w="{W}"><w:body>{body}</w:body></w:document>'
    )
    return write_zip(path, files).read_bytes()


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


def test_inserted_text_of_a_docx_is_read_and_deleted_text_is_not(tmp_path):
    body = (
        "<w:p><w:r><w:t>kept </w:t></w:r><w:ins><w:r><w:t>added</w:t></w:r></w:ins>"
        "<w:del><w:r><w:delText>gone</w:delText></w:r></w:del></w:p>"
        "<w:sdt><w:sdtContent><w:p><w:r><w:t>in a control</w:t></w:r></w:p></w:sdtContent></w:sdt>"
    )
    assert convert_docx(with_body(tmp_path / "a.docx", body)).text == "kept added\n\nin a control"


def test_code_of_a_docx_keeps_its_lines(tmp_path):
    document = docx.Document()
    document.styles.add_style("Source Code", 1)
    for line in ("x = 1", "  y = 2"):
        document.add_paragraph(line, style="Source Code")
    document.save(str(tmp_path / "a.docx"))
    assert convert_docx((tmp_path / "a.docx").read_bytes()).text == "```\nx = 1\n  y = 2\n```"


@pytest.mark.parametrize("missing", ["word/document.xml", "[Content_Types].xml", "_rels/.rels"])
def test_a_docx_without_a_part_gives_its_text_or_a_reason(tmp_path, missing):
    write_docx(tmp_path / "a.docx")
    with zipfile.ZipFile(tmp_path / "a.docx") as archive:
        files = {name: archive.read(name) for name in archive.namelist() if name != missing}
    try:
        assert SENTENCE in convert_docx(write_zip(tmp_path / "a.docx", files).read_bytes()).text
    except NotConverted as problem:
        assert problem.reason == "damaged"


def test_chapters_come_in_the_order_of_the_spine(tmp_path):
    chapters = {"1.xhtml": chapter("<h1>Second</h1><p>two</p>"), "2.xhtml": chapter("<h1>First</h1><p>one</p>")}
    book = convert_epub(write_epub(tmp_path / "a.epub", chapters).read_bytes())
    assert book.text == "# First\n\none\n\n# Second\n\ntwo" and book.title == "The book"


@pytest.mark.parametrize(
    "page, expected",
    [
        (chapter('<p>a&nbsp;&mdash;&nbsp;b &amp; c<a id="x"/></p><p>d</p>'), "a — b & c\n\nd"),
        ("<html><body><p>a<br>b<p>c", "a  \nb\n\nc"),
        (chapter("<p>before &l8; after</p>", BILLION_LAUGHS), "before &l8; after"),
    ],
)
def test_chapters_are_read_as_browsers_read_them(tmp_path, page, expected):
    text = convert_epub(write_epub(tmp_path / "a.epub", {"1.xhtml": page}).read_bytes()).text
    assert text.replace("\xa0", " ") == expected


def test_names_of_files_may_be_escaped(tmp_path):
    book = write_epub(tmp_path / "a.epub", {"a%20b.xhtml": chapter("")}, {"OPS/text/a b.xhtml": chapter("text")})
    assert convert_epub(book.read_bytes()).text == "text"


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


def test_a_bomb_that_lies_about_its_size_is_damaged(tmp_path):
    raw = write_zip(tmp_path / "a.epub", {"META-INF/container.xml": bytes(2**20)}).read_bytes()
    with pytest.raises(NotConverted, match="damaged zip"):
        convert_epub(raw.replace((2**20).to_bytes(4, "little"), (100).to_bytes(4, "little")))


def test_an_archive_with_a_password_is_encrypted(tmp_path):
    raw = bytearray(write_epub(tmp_path / "a.epub", {"1.xhtml": chapter("text")}).read_bytes())
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(NotConverted, match="encrypted"):
        convert_epub(bytes(raw))
