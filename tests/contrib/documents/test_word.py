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
    "wordml": "http://schemas.microsoft.com/office/word/2010/wordml",
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


def field(kind):
    return f'<w:r><w:fldChar w:fldCharType="{kind}"/></w:r>'


@pytest.fixture
def converted(tmp_path):
    """`converted(body, styles)`: the document of a DOCX with this body and these styles."""

    def convert(body, styles=""):
        names = "".join(f' xmlns:{name}="{uri}"' for name, uri in SPACES.items())
        document = f"<w:document{names}><w:body>{body}</w:body></w:document>"
        files = {
            "[Content_Types].xml": TYPES,
            "_rels/.rels": RELATIONS,
            "word/document.xml": document,
            "word/styles.xml": f"<w:styles{names}>{styles}</w:styles>",
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
        (
            f"<m:acc><m:accPr><m:chr m:val='\u030c'/></m:accPr><m:e>{math('v')}</m:e></m:acc>",
            r"\check{v}",
        ),
        (
            f"<m:eqArr><m:e>{math('a&amp;=b')}</m:e><m:e>{math('&amp;=c')}</m:e></m:eqArr>",
            r"\begin{aligned} a&=b \\ &=c \end{aligned}",
        ),
        (
            f"{math('a')}<w:commentRangeStart/><w:ins>{math('b')}</w:ins><w:del>{math('c')}</w:del>",
            "ab",
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


def test_bars_of_an_equation_do_not_end_the_cell_of_a_table(text_of):
    bars = f"<m:d><m:dPr><m:begChr m:val='|'/><m:endChr m:val='|'/></m:dPr><m:e>{math('x')}</m:e></m:d>"
    cell = f"<w:tc><w:p><m:oMath>{bars}</m:oMath></w:p></w:tc>"
    text = text_of(f"<w:tbl><w:tr>{cell}</w:tr></w:tbl>")
    assert text.splitlines()[0] == r"| $\left\vert x\right\vert $ |"


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


def test_all_shapes_of_a_picture_are_read(text_of):
    shapes = "".join(f"<v:rect><v:textbox>{box(text)}</v:textbox></v:rect>" for text in "ab")
    assert text_of(f"<w:p><w:r><w:pict>{shapes}</w:pict></w:r></w:p>") == "a\n\nb"


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
        ('<w:r><w:t>page</w:t><w:br w:type="page"/><w:t>next</w:t></w:r>', "page  \nnext"),
        (
            field("begin")
            + run("IF ")
            + field("begin")
            + field("separate")
            + run("9")
            + field("end")
            + field("separate")
            + run("result")
            + field("end")
            + run("."),
            "IF result.",
        ),
        (
            "<w:sdt><w:sdtPr><wordml:checkbox><wordml:checked wordml:val='1'/></wordml:checkbox></w:sdtPr>"
            f"<w:sdtContent>{run('☒')}</w:sdtContent></w:sdt>{run(' yes')}",
            "☑ yes",
        ),
        (
            f"<w:del><w:r><w:delText>gone</w:delText></w:r></w:del>{run('kept')}<w:bdo>{run('!')}</w:bdo>",
            "kept!",
        ),
    ],
)
def test_fields_directions_and_ruby_keep_their_text(text_of, content, expected):
    assert text_of(f"<w:p>{content}</w:p>") == expected


def test_deleted_text_and_formulas_in_fields_are_counted(converted):
    deleted = "<w:del><w:r><w:delText>gone</w:delText></w:r></w:del>"
    equation = "<w:r><w:instrText> EQ \\f(1,2) </w:instrText></w:r>"
    document = converted(f"<w:p>{run('a')}{deleted}{field('begin')}{equation}{field('end')}</w:p>")
    assert document.text == "a"
    assert document.dropped == {"deleted text": 1, "formulas in fields": 1}


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


STYLES = (
    '<w:style w:type="character" w:styleId="Secret"><w:rPr><w:vanish/></w:rPr></w:style>'
    '<w:style w:type="character" w:styleId="Note"><w:basedOn w:val="Secret"/></w:style>'
    '<w:style w:type="character" w:styleId="Shown"><w:basedOn w:val="Note"/>'
    '<w:rPr><w:vanish w:val="0"/></w:rPr></w:style>'
)


@pytest.mark.parametrize(
    "paragraph, of_run, is_hidden",
    [
        ("", '<w:rStyle w:val="Secret"/>', True),
        ("", '<w:rStyle w:val="Note"/>', True),
        ("", '<w:rStyle w:val="Shown"/>', False),
        ("", '<w:rStyle w:val="Secret"/><w:vanish w:val="false"/>', False),
        ('<w:pStyle w:val="Secret"/>', "", True),
        ('<w:pStyle w:val="Secret"/>', '<w:rStyle w:val="Shown"/>', False),
    ],
)
def test_a_style_hides_text_as_a_mark_does(converted, paragraph, of_run, is_hidden):
    secret = (
        f"<w:p><w:pPr>{paragraph}</w:pPr><w:r><w:rPr>{of_run}</w:rPr><w:t>secret</w:t></w:r></w:p>"
    )
    document = converted(f"{secret}<w:p>{run('kept')}</w:p>", STYLES)
    assert ("secret" not in document.text) == is_hidden
    assert document.dropped == ({"hidden text": 1} if is_hidden else {})


def test_an_ordered_list_goes_on_after_another_paragraph(tmp_path):
    document = docx.Document()
    for text, style in (
        ("one", "List Number"),
        ("a note", None),
        ("two", "List Number"),
        ("a", "List Number 2"),
        ("dot", "List Bullet"),
        ("three", "List Number"),
    ):
        document.add_paragraph(text, style=style)
    document.save(str(tmp_path / "a.docx"))
    text = convert_docx((tmp_path / "a.docx").read_bytes()).text
    assert " ".join(text.split()) == "1. one a note 2. two 1. a - dot 3. three"
