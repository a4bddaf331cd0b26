import docx
import pytest
from tiny_documents import write_zip

from cpt.contrib.documents.convert import convert_docx
from cpt.contrib.documents.formulas import NO_LAYOUT

SPACES = {
    "w": "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "m": "http://schemas.openxmlformats.org/officeDocument/2006/math",
    "mc": "http://schemas.openxmlformats.org/markup-compatibility/2006",
    "wp": "http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing",
    "a": "http://schemas.openxmlformats.org/drawingml/2006/main",
    "wps": "http://schemas.microsoft.com/office/word/2010/wordprocessingShape",
    "c": "http://schemas.openxmlformats.org/drawingml/2006/chart",
    "v": "urn:schemas-microsoft-com:vml",
}
TYPES = (
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"><Override PartName="/word/document.xml"'  # noqa: E501
    ' ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>'
)
RELATIONS = (
    '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship Id="r1" '
    'Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument" '
    'Target="word/document.xml"/></Relationships>'
)


def run(text):
    return f'<w:r><w:t xml:space="preserve">{text}</w:t></w:r>'


def math(text):
    return f"<m:r><m:t>{text}</m:t></m:r>"


def box(text):
    return f"<w:txbxContent><w:p>{run(text)}</w:p></w:txbxContent>"


@pytest.fixture
def converted(tmp_path):
    """`converted(body)`: the document of a DOCX with this body."""

    def convert(body):
        names = "".join(f' xmlns:{name}="{uri}"' for name, uri in SPACES.items())
        document = f"<w:document{names}><w:body>{body}</w:body></w:document>"
        files = {
            "[Content_Types].xml": TYPES,
            "_rels/.rels": RELATIONS,
            "word/document.xml": document,
        }
        return convert_docx(write_zip(tmp_path / "a.docx", files).read_bytes())

    return convert


@pytest.fixture
def text_of(converted):
    return lambda body: converted(body).text


FRACTION = f"<m:f><m:num>{math('s')}</m:num><m:den>{math('t')}</m:den></m:f>"
NARY = f'<m:nary><m:naryPr><m:chr m:val="∑"/></m:naryPr><m:sub>{math("i=1")}</m:sub><m:sup>{math("n")}</m:sup><m:e>{math("i")}</m:e></m:nary>'  # noqa: E501
MATRIX = (
    "<m:m>"
    + "".join(f"<m:mr><m:e>{math(a)}</m:e><m:e>{math(b)}</m:e></m:mr>" for a, b in ("ab", "01"))
    + "</m:m>"
)


@pytest.mark.parametrize(
    "omml, tex",
    [
        (math("v=") + FRACTION, r"v=\frac{s}{t}"),
        (f"<m:sSup><m:e>{math('𝑥')}</m:e><m:sup>{math('10')}</m:sup></m:sSup>", "x^{10}"),
        (f"<m:sSub><m:e>{math('H')}</m:e><m:sub>{math('2')}</m:sub></m:sSub>{math('O')}", "H_2 O"),
        (
            f"<m:sSubSup><m:e>{math('x')}</m:e><m:sub>{math('i')}</m:sub><m:sup>{math('2')}</m:sup></m:sSubSup>",
            "x_i^2",
        ),
        (f"<m:rad><m:deg/><m:e>{math('a+b')}</m:e></m:rad>", r"\sqrt{a+b}"),
        (f"<m:rad><m:deg>{math('3')}</m:deg><m:e>{math('x')}</m:e></m:rad>", r"\sqrt[3]{x}"),
        (NARY, r"\sum_{i=1}^n i"),
        (
            f"<m:nary><m:sub>{math('0')}</m:sub><m:sup>{math('∞')}</m:sup><m:e>{math('f')}</m:e></m:nary>",
            r"\int_0^\infty f",
        ),
        (
            f"<m:d><m:e>{MATRIX}</m:e></m:d>",
            r"\left(\begin{matrix} a & b \\ 0 & 1 \end{matrix}\right)",
        ),
        (
            f'<m:d><m:dPr><m:begChr m:val="{{"/><m:endChr m:val=""/></m:dPr><m:e>{math("x")}</m:e></m:d>',
            r"\left\{x\right.",
        ),
        (
            f"<m:func><m:fName>{math('sin')}</m:fName><m:e>{math('α')}</m:e></m:func>",
            r"\sin \alpha",
        ),
        (f'<m:acc><m:accPr><m:chr m:val="⃗"/></m:accPr><m:e>{math("v")}</m:e></m:acc>', r"\vec{v}"),
        (
            f"<m:limLow><m:e>{math('lim')}</m:e><m:lim>{math('n→∞')}</m:lim></m:limLow>",
            r"\lim_{n\to\infty}",
        ),
    ],
)
def test_an_equation_becomes_tex(text_of, omml, tex):
    assert (
        text_of(f"<w:p>{run('The speed ')}<m:oMath>{omml}</m:oMath>{run(' for all.')}</w:p>")
        == f"The speed ${tex}$ for all."
    )


def test_an_equation_on_its_own_line_is_displayed(text_of):
    body = f"<w:p>{run('a')}</w:p><w:p><m:oMathPara><m:oMath>{FRACTION}</m:oMath></m:oMathPara></w:p><w:p>{run('b')}</w:p>"  # noqa: E501
    assert text_of(body) == "a\n\n$$\\frac{s}{t}$$\n\nb"


def test_an_equation_that_cannot_be_translated_is_counted_and_its_characters_stay(converted):
    document = converted(f"<w:p><m:oMath><m:unknown>{math('xyz')}</m:unknown></m:oMath></w:p>")
    assert document.text == "xyz" and document.dropped == {NO_LAYOUT: 1}


def drawing(content):
    return (
        "<w:drawing><wp:inline><a:graphic><a:graphicData><wps:wsp><wps:txbx>"
        f"{content}</wps:txbx></wps:wsp></a:graphicData></a:graphic></wp:inline></w:drawing>"
    )


@pytest.mark.parametrize(
    "shape",
    [
        drawing(box("NEVER moor")),
        f"<mc:AlternateContent><mc:Choice>{drawing(box('NEVER moor'))}</mc:Choice><mc:Fallback><w:pict><v:shape>"
        f"<v:textbox>{box('NEVER moor')}</v:textbox></v:shape></w:pict></mc:Fallback></mc:AlternateContent>",
        f"<mc:AlternateContent><mc:Choice>{drawing(box('NEVER moor'))}</mc:Choice></mc:AlternateContent>",
        f"<w:pict><v:shape><v:textbox>{box('NEVER moor')}</v:textbox></v:shape></w:pict>",
    ],
)
def test_a_text_box_is_once_in_the_text_after_its_paragraph(text_of, shape):
    assert (
        text_of(f"<w:p>{run('a')}<w:r>{shape}</w:r></w:p><w:p>{run('End.')}</w:p>")
        == "a\n\nNEVER moor\n\nEnd."
    )


def test_an_equation_and_a_box_in_a_box_are_kept(text_of):
    inner = f"<w:p><m:oMath>{FRACTION}</m:oMath></w:p><w:p>{run('outer')}<w:r>{drawing(box('inner'))}</w:r></w:p>"
    body = f"<w:p><w:r>{drawing(f'<w:txbxContent>{inner}</w:txbxContent>')}</w:r></w:p>"
    assert text_of(body) == "$\\frac{s}{t}$\n\nouter\n\ninner"


@pytest.mark.parametrize(
    "content, expected",
    [
        (
            f'{run("Table ")}<w:fldSimple w:instr=" SEQ Table ">{run("17")}</w:fldSimple>{run(": tides")}',
            "Table 17: tides",
        ),
        (
            f'<w:dir w:val="rtl">{run("שלום")}</w:dir><w:bdo w:val="ltr">{run(" abc")}</w:bdo>',
            "שלום abc",
        ),
        (
            f"<w:ruby><w:rt>{run('kan')}</w:rt><w:rubyBase>{run('漢')}</w:rubyBase></w:ruby>{run('字')}",
            "漢字",
        ),
        (
            f"<w:r><w:ruby><w:rt>{run('kan')}</w:rt><w:rubyBase>{run('漢')}</w:rubyBase></w:ruby></w:r>",
            "漢",
        ),
        (
            f'<w:fldSimple><w:bdo w:val="rtl">{run("a")}</w:bdo></w:fldSimple><w:customXml>{run("b")}</w:customXml>',
            "ab",
        ),
        ("<w:r><w:t>left</w:t><w:ptab/><w:t>right</w:t></w:r>", "left right"),
        (
            f"<w:del><w:r><w:delText>gone</w:delText></w:r></w:del>{run('kept')}<w:bdo>{run('!')}</w:bdo>",
            "kept!",
        ),
    ],
)
def test_fields_directions_and_ruby_keep_their_text(text_of, content, expected):
    assert text_of(f"<w:p>{content}</w:p>") == expected


def test_pictures_and_charts_are_counted(converted):
    chart = "<w:drawing><wp:inline><a:graphic><a:graphicData><c:chart/></a:graphicData></a:graphic></wp:inline></w:drawing>"  # noqa: E501
    document = converted(f"<w:p>{run('a')}<w:r>{chart}</w:r></w:p>")
    assert document.text == "a" and document.dropped == {"charts and diagrams": 1}


def test_comments_and_pictures_are_counted(tmp_path):
    document = docx.Document()
    paragraph = document.add_paragraph("text")
    document.add_comment(paragraph.runs, text="is this so?", author="a", initials="a")
    document.save(str(tmp_path / "a.docx"))
    assert convert_docx((tmp_path / "a.docx").read_bytes()).dropped == {"comments": 1}


@pytest.mark.parametrize(
    "mark, text, dropped",
    [
        ("<w:vanish/>", "kept", {"hidden text": 1}),
        ('<w:vanish w:val="true"/>', "kept", {"hidden text": 1}),
        ('<w:vanish w:val="0"/>', "kept secret", {}),
    ],
)
def test_hidden_text_is_dropped_and_counted(converted, mark, text, dropped):
    hidden = f"<w:r><w:rPr>{mark}</w:rPr><w:t xml:space='preserve'> secret</w:t></w:r>"
    document = converted(f"<w:p>{run('kept')}{hidden}</w:p>")
    assert (document.text, document.dropped) == (text, dropped)
