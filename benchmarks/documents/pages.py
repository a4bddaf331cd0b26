"""A small page of each kind of content that converters lose, with the right text and what should be counted."""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field

from cpt.contrib.documents.convert import CONVERTERS, with_clean_text
from cpt.contrib.documents.errors import NotConverted

TEX = r"v = \frac{s}{t}"
FRACTION = "<mrow><mi>v</mi><mo>=</mo><mfrac><mi>s</mi><mi>t</mi></mfrac></mrow>"
ANNOTATED = (
    f'<math><semantics>{FRACTION}<annotation encoding="application/x-tex">{TEX}</annotation>'
    "</semantics></math>"
)
KATEX = (
    f'<span class=katex><span class="katex-mathml">{ANNOTATED}</span><span class="katex-html"'
    ' aria-hidden="true"><span class="mord">v</span><span class="mrel">=</span>st</span></span>'
)
MATHJAX2 = (
    '<span class="MathJax_Preview">v=s/t</span><span class="MathJax" id="MathJax-Element-1-Frame">'
    f'<nobr>v=st</nobr></span><script type="math/tex" id="MathJax-Element-1">{TEX}</script>'
)
MATHJAX3 = (
    '<mjx-container class="MathJax" jax="CHTML"><mjx-math aria-hidden="true"><mjx-mi></mjx-mi></mjx-math>'
    f"<mjx-assistive-mml><math>{FRACTION}</math></mjx-assistive-mml></mjx-container>"
)
WIKIPEDIA = (
    f'<span class="mwe-math-element"><span class="mwe-math-mathml-inline" style="display: none">{ANNOTATED}'
    rf'</span><img class="mwe-math-fallback-image-inline" alt="{{\displaystyle {TEX}}}"></span>'
)
SPACES = (
    'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    ' xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
    ' xmlns:v="urn:schemas-microsoft-com:vml"'
)
TYPES = (
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"><Override'
    ' PartName="/word/document.xml"'
    ' ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>'
)
RELATIONS = (
    '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship Id="r1"'
    ' Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"'
    ' Target="word/document.xml"/></Relationships>'
)
OMML = (
    "<m:oMath><m:r><m:t>v=</m:t></m:r><m:f><m:num><m:r><m:t>s</m:t></m:r></m:num>"
    "<m:den><m:r><m:t>t</m:t></m:r></m:den></m:f></m:oMath>"
)
PDF = """%PDF-1.5
1 0 obj
<< /Type /Catalog /Pages 2 0 R {catalog} >>
endobj
2 0 obj
<< /Type /Pages /Count {count} /Kids [{kids}] >>
endobj
3 0 obj
<< /Type /Annot /Subtype /Widget /FT /Tx /T (surname) /V (Okonkwo) /Rect [200 755 400 771] /F 4
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
<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Resources << /Font << /F1 4 0 R >> >> /Contents 5 0 R {page} >>
endobj
7 0 obj
<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] >>
endobj
8 0 obj
<< /Length 6 >>
stream
<xdp/>
endstream
endobj
trailer << /Size 9 /Root 1 0 R >>
%%EOF
"""
FORM = "/AcroForm << /Fields [3 0 R] /NeedAppearances true {} >>"


@dataclass(frozen=True)
class Page:
    kind: str
    raw: bytes
    expected: str
    """The text, or the reason why there is none."""
    dropped: Mapping[str, int] = field(default_factory=dict)

    def is_right(self) -> bool:
        try:
            document = with_clean_text(CONVERTERS[self.kind][0](self.raw))
        except NotConverted as problem:
            return problem.reason == self.expected
        return document.text == self.expected and dict(document.dropped) == dict(self.dropped)


def html(content: str) -> bytes:
    return f"<meta charset=utf-8><p>a {content} b</p>".encode()


def docx(content: str) -> bytes:
    document = f"<w:document {SPACES}><w:body><w:p>{content}</w:p></w:body></w:document>"
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("[Content_Types].xml", TYPES)
        archive.writestr("_rels/.rels", RELATIONS)
        archive.writestr("word/document.xml", document)
    return stream.getvalue()


def run(text: str, properties: str = "") -> str:
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def box(text: str) -> str:
    content = f"<w:txbxContent><w:p>{run(text)}</w:p></w:txbxContent>"
    return f"<w:r><w:pict><v:shape><v:textbox>{content}</v:textbox></v:shape></w:pict></w:r>"


def ruby(base: str, reading: str) -> str:
    return f"<w:ruby><w:rt>{run(reading)}</w:rt><w:rubyBase>{run(base)}</w:rubyBase></w:ruby>"


def pdf(lines: list[str], catalog: str = "", page: str = "", num_empty: int = 0) -> bytes:
    shown = " ".join(f"({line}) Tj 0 -14 Td" for line in lines)
    content = f"BT /F1 11 Tf 60 760 Td {shown} ET"
    kids = " ".join(["6 0 R", *["7 0 R"] * num_empty])
    options = {"catalog": catalog, "page": page, "count": 1 + num_empty, "kids": kids}
    return PDF.format(length=len(content), content=content, **options).encode("latin-1")


PAGES = {
    "KaTeX": Page("html", html(KATEX), f"a ${TEX}$ b"),
    "MathJax 2": Page("html", html(MATHJAX2), f"a ${TEX}$ b"),
    "MathJax 3": Page("html", html(MATHJAX3), r"a $v=\frac{s}{t}$ b"),
    "MathML": Page("html", html(f"<math>{FRACTION}</math>"), r"a $v=\frac{s}{t}$ b"),
    "Wikipedia": Page("html", html(WIKIPEDIA), f"a ${TEX}$ b"),
    "TeX in the text": Page(
        "html", html(r"\(a_1 * b_2\) \# $$x_i$$"), r"a \(a_1 * b_2\) \# $$x_i$$ b"
    ),
    "ruby in HTML": Page(
        "html", html("<ruby>漢<rt>kan</rt></ruby>字"), "a 漢字 b", {"readings": 1}
    ),
    "drawing in HTML": Page(
        "html", html("<svg><text>axis</text></svg>"), "a b", {"drawings with text": 1}
    ),
    "OMML": Page("docx", docx(run("a ") + OMML), r"a $v=\frac{s}{t}$"),
    "DOCX, text box": Page("docx", docx(run("a") + box("moor")), "a\n\nmoor"),
    "DOCX, simple field": Page(
        "docx",
        docx(f'{run("Table ")}<w:fldSimple w:instr="SEQ">{run("17")}</w:fldSimple>'),
        "Table 17",
    ),
    "DOCX, ruby": Page("docx", docx(ruby("漢", "kan") + run("字")), "漢字", {"readings": 1}),
    "DOCX, bdo and dir": Page(
        "docx",
        docx(f'<w:dir w:val="rtl">{run("שלום")}</w:dir><w:bdo w:val="ltr">{run(" a")}</w:bdo>'),
        "שלום a",
    ),
    "DOCX, hidden text": Page(
        "docx", docx(run("a") + run("secret", "<w:vanish/>")), "a", {"hidden text": 1}
    ),
    "PDF form": Page(
        "pdf", pdf(["Surname:"], FORM.format(""), "/Annots [3 0 R]"), "Surname: Okonkwo"
    ),
    "PDF, scans": Page("pdf", pdf(["Text."], num_empty=9), "Text.", {"pages without text": 9}),
    "PDF, only scans": Page("pdf", pdf([], num_empty=1), "no text, a scan?"),
    "PDF, XFA": Page(
        "pdf",
        pdf(["Please wait..."], "/NeedsRendering true " + FORM.format("/XFA 8 0 R")),
        "an XFA form",
    ),
    "PDF, hyphens": Page(
        "pdf",
        pdf(
            [
                "The harbour master wrote a well-known led\\255",
                "ger about the non\\255",
                "ferrous copper.",
            ]
        ),
        "The harbour master wrote a well-known ledger about the non-ferrous copper.",
    ),
}
