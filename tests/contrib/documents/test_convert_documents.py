import pytest
from reportlab.lib.pagesizes import A4
from tiny_documents import (
    CONTAINER,
    PAGE,
    SENTENCE,
    chapter,
    write_docx,
    write_epub,
    write_pdf,
    write_zip,
)

from cpt.contrib.documents import convert
from cpt.contrib.documents.convert import (
    Converted,
    convert_docx,
    convert_epub,
    convert_html,
    convert_pdf,
    convert_plain,
    kind_of,
    with_clean_text,
)
from cpt.contrib.documents.errors import NotConverted

ENTITIES = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 9))
BILLION_LAUGHS = f'<!DOCTYPE html [<!ENTITY l0 "ha">{ENTITIES}]>'
DRM = (
    '<encryption xmlns:enc="http://www.w3.org/2001/04/xmlenc#"><enc:EncryptedData><enc:CipherData>'
    '<enc:CipherReference URI="{}"/></enc:CipherData></enc:EncryptedData></encryption>'
)


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
        ("a.docx", b"no zip", "not what its suffix says"),
        ("a.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "encrypted or old Office file"),
        ("a.epub", b"PK\x03\x04 cut off", "damaged zip"),
        ("a.png", b"\x89PNG", "unknown kind"),
    ],
)
def test_a_file_that_is_no_document_has_a_reason(name, content, reason):
    with pytest.raises(NotConverted) as raised:
        kind_of(content, name)
    assert raised.value.reason == reason


# PDF


def header_and_footer(canvas, number):
    canvas.drawString(72, 800, "Journal of Catalysis, volume 3")
    canvas.drawString(300, 30, f"Page {number} of 9")


def test_headers_and_footers_of_a_pdf_are_removed(tmp_path):
    pages = [
        [f"The text of page {number} begins here", f"and ends with number {number}."]
        for number in range(4)
    ]
    document = convert_pdf(
        write_pdf(tmp_path / "a.pdf", pages, header_and_footer, title="On catalysts").read_bytes()
    )
    assert (document.title, document.pages) == ("On catalysts", 4)
    assert document.text == "\n\n".join(" ".join(lines) for lines in pages)


def test_a_page_with_nothing_but_a_footer_has_no_text(tmp_path):
    pdf = write_pdf(tmp_path / "a.pdf", [[SENTENCE], [], []], header_and_footer)
    dropped = {"running headers and footers": 6, "pages without text": 2}
    assert convert_pdf(pdf.read_bytes()).dropped == dropped


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_running_headers_are_found_on_rotated_pages(tmp_path, degrees):
    def draw(canvas, number):
        width, height = A4
        canvas.setPageRotation(degrees)
        # Where the lower left corner is before the page is rotated.
        corners = {0: (0, 0), 90: (height, 0), 180: (width, height), 270: (0, width)}
        canvas.translate(*corners[degrees])
        canvas.rotate(degrees)
        canvas.drawString(72, height - 30, "Journal of Catalysis")
        canvas.drawString(72, 300, f"The text of {'abc'[number - 1]}.")

    text = convert_pdf(write_pdf(tmp_path / "a.pdf", 3, draw).read_bytes()).text
    assert " ".join(text.split()) == "The text of a. The text of b. The text of c."


def test_a_word_that_was_cut_at_the_end_of_a_page_is_whole_again(tmp_path):
    pages = [["The cata-"], ["lyst is well-"], ["known."]]
    pdf = write_pdf(tmp_path / "a.pdf", pages, header_and_footer)
    assert convert_pdf(pdf.read_bytes()).text == "The catalyst is well-known."


def test_a_word_that_was_cut_at_the_end_of_a_line_is_whole_again(tmp_path):
    lines = ["The cata-", "lyst of a long reac-", "tion is ex-", "Platinum."]
    text = convert_pdf(write_pdf(tmp_path / "a.pdf", [lines]).read_bytes()).text
    assert text == "The catalyst of a long reaction is ex-Platinum."


def test_titles_of_the_outline_are_headings(tmp_path):
    def draw(canvas, number):
        canvas.bookmarkPage("here")
        canvas.addOutlineEntry("Kinds", "here", level=0)

    text = convert_pdf(
        write_pdf(tmp_path / "a.pdf", [["2.1 Kinds", SENTENCE]], draw).read_bytes()
    ).text
    assert text == f"# 2.1 Kinds\n\n{SENTENCE}"


def test_a_scan_a_password_and_damage_have_a_reason(tmp_path):
    scan = write_pdf(tmp_path / "a.pdf", 2).read_bytes()
    locked = write_pdf(tmp_path / "b.pdf", [[SENTENCE]], password="secret").read_bytes()
    for raw, reason in ((scan, "a scan"), (locked, "encrypted"), (b"%PDF-1.4 cut off", "damaged")):
        with pytest.raises(NotConverted, match=reason):
            convert_pdf(raw)


# HTML


def test_a_page_becomes_its_text_with_structure_and_title():
    page = convert_html(PAGE.encode())
    blocks = page.text.split("\n\n")
    assert page.title == "On catalysts" and blocks[0] == "# Catalysts" and blocks[2] == "## Kinds"
    assert blocks[3] == "- homogeneous\n- heterogeneous"
    assert blocks[-1] == "| Metal | Use |\n| --- | --- |\n| Nickel | Margarine |"
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
        ("a<script>no()</script><style>no</style><!-- no --> <i>b</i>", "a b"),
        ("<ruby>漢<rp>(</rp><rt>kan</rt><rp>)</rp></ruby>", "漢"),
        ("<p>日本\n  語と English\nwords</p>", "日本語と English words"),
        (
            "<p>2<sup>31</sup>, H<sub>2</sub>O, x<sub>i+1</sub>, see<sup>[4]</sup></p>",
            "2^31, H_2O, x_(i+1), see[4]",
        ),
        ("<form><p>a page in a form</p><button>no</button></form>", "a page in a form"),
        ("<title>t</title><nav>only a menu</nav>", "only a menu"),
        ("<p>a<p>b<table><tr><td>c</p></div>\0", "a\n\nb"),
    ],
)
def test_html_is_written_as_markdown(html, expected):
    text = convert_html(html.encode()).text
    assert text[: len(expected)] == expected and text.count("\n") <= expected.count("\n") + 3


# DOCX and EPUB


def test_headings_text_lists_and_tables_of_a_docx_come_in_their_order(tmp_path):
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
    chapters = {
        "1.xhtml": chapter("<h1>Second</h1><p>two</p>"),
        "2.xhtml": chapter("<h1>First</h1><p>one</p>"),
    }
    book = convert_epub(write_epub(tmp_path / "a.epub", chapters).read_bytes())
    assert book.text == "# First\n\none\n\n# Second\n\ntwo" and book.title == "The book"


@pytest.fixture
def book(tmp_path):
    """`book({"a.css": ...})`: a book of one chapter with such files beside it."""

    def write(more):
        return write_epub(tmp_path / "a.epub", {"1.xhtml": chapter("text")}, more).read_bytes()

    return write


def test_a_book_with_rights_management_is_encrypted_and_one_with_hidden_fonts_is_not(book):
    assert (
        convert_epub(book({"META-INF/encryption.xml": DRM.format("OPS/font.ttf")})).text == "text"
    )
    with pytest.raises(NotConverted, match="encrypted"):
        convert_epub(book({"META-INF/encryption.xml": DRM.format("OPS/text/1.xhtml")}))


def test_a_zip_bomb_is_refused_before_anything_is_unpacked(book, monkeypatch):
    monkeypatch.setattr(convert, "MAX_UNPACKED_BYTES", 10 * 2**20)
    assert convert_epub(book({"OPS/image.png": bytes(11 * 2**20)})).text == "text"
    with pytest.raises(NotConverted, match="too large"):
        convert_epub(book({"OPS/bomb.css": bytes(11 * 2**20)}))


@pytest.mark.parametrize(
    "container, more",
    [
        ("<x/>", {}),
        (CONTAINER.format("a.opf"), {}),
        (CONTAINER.format("a.opf"), {"a.opf": "<package/>"}),
        (f"{BILLION_LAUGHS}<x>&l8;</x>", {}),
    ],
)
def test_a_damaged_book_has_a_reason(tmp_path, container, more):
    with pytest.raises(NotConverted, match="damaged"):
        convert_epub(
            write_zip(
                tmp_path / "a.epub", {"META-INF/container.xml": container, **more}
            ).read_bytes()
        )


# Text


def test_characters_that_no_text_has_are_removed():
    document = with_clean_text(Converted("\n\na\0\x07b \ud800\ufeff\n\n\n\n  c\td\x1f\n", "t\0"))
    assert document.text == "ab\n\n  c\td" and document.title == "t"
    assert with_clean_text(Converted("a  \n\n\n b\xad\n"), tidy=False).text == "a  \n\n\n b\n"
    with pytest.raises(NotConverted, match="no text"):
        with_clean_text(Converted(" \n\0"))


@pytest.mark.parametrize(
    "raw", ["\ufeffä\r\nb".encode(), "ä\rb".encode("utf-16"), "ä\r\nb".encode()]
)
def test_text_is_read_in_its_encoding_with_one_kind_of_line_end(raw):
    assert convert_plain(raw).text.startswith("ä\nb")


# What a PDF does not say plainly


@pytest.mark.parametrize(
    "lines, expected",
    [
        (["The har-", "bour master"], "The harbour master"),
        (["a well-", "known ledger"], "a well-known ledger"),
        (["of non-", "ferrous metal"], "of non-ferrous metal"),
        (["he re-", "entered it"], "he re-entered it"),
        (["he re-", "turned"], "he returned"),
        (["a state-of-the-", "art ferry"], "a state-of-the-art ferry"),
        (["by x-", "ray only"], "by x-ray only"),
        (["a time-", "dependent field"], "a time-dependent field"),
        (["an in-", "dependent one"], "an independent one"),
        (["a self-", "less act"], "a selfless act"),
        (["the tide-table and its tide-", "table"], "the tide-table and its tide-table"),
        (["a wellhead, a well-", "head"], "a wellhead, a wellhead"),
        (["the pre-", "and post-war trade"], "the pre- and post-war trade"),
        (["die Ein-", "und Ausgabe"], "die Ein- und Ausgabe"),
        (["a low-", "pressure boiler"], "a low-pressure boiler"),
        (["the twenty-", "five ships"], "the twenty-five ships"),
        (["the years 1914\u2013", "1918 were hard"], "the years 1914\u20131918 were hard"),
        (["on pages 12-", "15 of the book"], "on pages 12-15 of the book"),
    ],
)
def test_a_hyphen_at_a_line_end_stays_only_if_it_belongs_to_the_word(tmp_path, lines, expected):
    assert convert_pdf(write_pdf(tmp_path / "a.pdf", [lines]).read_bytes()).text == expected


def test_what_is_written_into_a_form_is_where_it_is_read(tmp_path):
    def draw(canvas, number):
        for name, value, y in (("a", "Okonkwo of Lagos", 755), ("b", "7", 731), ("c", "Ada", 690)):
            canvas.acroForm.textfield(name=name, value=value, x=140, y=y, width=200, height=20)

    lines = ["Surname:", "", "Number:", "", "Signed:", "", "", "", "by the clerk."]
    document = convert_pdf(write_pdf(tmp_path / "a.pdf", [lines], draw).read_bytes())
    words = " ".join(document.text.split())
    assert words == "Surname: Okonkwo of Lagos Number: 7 Signed: Ada by the clerk."


FORM = """%PDF-1.5
1 0 obj
<< /Type /Catalog /Pages 2 0 R {rendering} /AcroForm << /Fields [3 0 R] /NeedAppearances true {xfa} >> >>
endobj
2 0 obj
<< /Type /Pages /Count 1 /Kids [6 0 R] >>
endobj
3 0 obj
<< /Type /Annot /Subtype /Widget /FT /Tx /T (surname) /V (Okonkwo) /Rect [200 700 400 716] /F 4
/DA (/Helv 11 Tf 0 g) >>
endobj
4 0 obj
<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>
endobj
5 0 obj
<< /Length {length} >>
stream
{content}
endstream
endobj
6 0 obj
<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Resources << /Font << /F1 4 0 R >> >> /Contents 5 0 R
/Annots [3 0 R] >>
endobj
7 0 obj
<< /Length 6 >>
stream
<xdp/>
endstream
endobj
trailer << /Size 8 /Root 1 0 R >>
%%EOF
"""


def form(text, rendering="", xfa=""):
    content = f"BT /F1 11 Tf 60 760 Td ({text}) Tj ET"
    return FORM.format(rendering=rendering, xfa=xfa, content=content, length=len(content)).encode()


def test_a_form_whose_values_were_never_drawn_has_them_too():
    assert convert_pdf(form("Name of the applicant:")).text == "Name of the applicant: Okonkwo"


@pytest.mark.parametrize(
    "text, rendering",
    [
        ("Please wait...", "/NeedsRendering true"),
        ("Please wait... If this message is not eventually replaced by", ""),
    ],
)
def test_an_xfa_form_without_pages_is_refused(text, rendering):
    with pytest.raises(NotConverted, match="an XFA form"):
        convert_pdf(form(text, rendering, "/XFA 7 0 R"))


def test_an_xfa_form_with_pages_is_read():
    assert convert_pdf(form("Name of the applicant:", "", "/XFA 7 0 R")).text.startswith(
        "Name of the applicant:"
    )


def test_pages_without_text_are_counted(tmp_path):
    document = convert_pdf(write_pdf(tmp_path / "a.pdf", [[SENTENCE], *[[]] * 9]).read_bytes())
    assert (document.text, document.pages, document.dropped) == (
        SENTENCE,
        10,
        {"pages without text": 9},
    )
    assert not convert_pdf(write_pdf(tmp_path / "a.pdf", [[SENTENCE]]).read_bytes()).dropped


def test_what_a_page_shows_without_text_is_counted():
    page = "<p>a</p><svg><path d=M/></svg><svg><g><text>axis</text></g></svg><select><option>b</select>"
    dropped = convert_html(f"{page}<textarea> </textarea><button>Copy</button>".encode()).dropped
    assert dropped == {"drawings with text": 1, "input fields with text": 1}
