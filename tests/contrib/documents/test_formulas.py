from xml.etree import ElementTree

import pytest
from tiny_documents import chapter, write_epub

from cpt.contrib.documents.convert import convert_epub, convert_html
from cpt.contrib.documents.formulas import NO_LAYOUT
from cpt.contrib.documents.tex import Untranslatable, of_mathml

FRACTION = "<mrow><mi>v</mi><mo>=</mo><mfrac><mi>s</mi><mi>t</mi></mfrac></mrow>"
TEX = r"v = \frac{s}{t}"
TEX_ANNOTATION = f'<annotation encoding="application/x-tex">{TEX}</annotation>'
ANNOTATED = f"<math><semantics>{FRACTION}{TEX_ANNOTATION}</semantics></math>"
KATEX = (
    f'<span class="katex"><span class="katex-mathml">{ANNOTATED}</span><span class="katex-html" aria-hidden="true">'
    '<span class="base"><span class="mord mathnormal">v</span><span class="mrel">=</span></span>'
    '<span class="mord">ts</span></span></span>'
)
WIKIPEDIA = (
    '<span class="mwe-math-element"><span class="mwe-math-mathml-inline" style="display: none;">'
    rf'<math alttext="{{\displaystyle {TEX}}}"><semantics>{FRACTION}<annotation encoding="application/x-tex">'
    rf"{{\displaystyle {TEX}}}</annotation></semantics></math></span>"
    rf'<img class="mwe-math-fallback-image-inline" alt="{{\displaystyle {TEX}}}"></span>'
)
MATHJAX2 = (
    '<span class="MathJax_Preview">v=s/t</span><span class="MathJax" id="MathJax-Element-1-Frame" role="presentation">'
    '<nobr>v=st</nobr></span><script type="math/tex" id="MathJax-Element-1">{}</script>'
)
MATHJAX3 = (
    '<mjx-container class="MathJax" jax="CHTML"{}><mjx-math aria-hidden="true"><mjx-mi><mjx-c class="mjx-c1D463">'
    f"</mjx-c></mjx-mi></mjx-math><mjx-assistive-mml><math>{FRACTION}</math></mjx-assistive-mml></mjx-container>"
)


def text_of(html):
    page = convert_html(f"<meta charset=utf-8><p>a {html} b</p>".encode())
    assert not page.dropped
    return page.text


@pytest.mark.parametrize(
    "html, expected",
    [
        (KATEX, f"${TEX}$"),
        (f'<span class="katex-display">{KATEX}</span>', f"$${TEX}$$"),
        (f'<script type="math/tex">{TEX}</script>', f"${TEX}$"),
        (MATHJAX2.format("a < b"), "$a < b$"),
        ('<script type="math/tex">% <![CDATA[\na < b %]]></script>', "$a < b$"),
        (f'<script type="math/mml"><math>{FRACTION}</math></script>', r"$v=\frac{s}{t}$"),
        (
            f"<span class=MathJax data-mathml='<math>{FRACTION}</math>'><nobr>vst</nobr></span>",
            r"$v=\frac{s}{t}$",
        ),
        (MATHJAX3.format(""), r"$v=\frac{s}{t}$"),
        (MATHJAX3.format(' display="true"'), r"$$v=\frac{s}{t}$$"),
        (
            f'<mjx-container><mjx-math data-latex="{TEX}"><mjx-mi>v</mjx-mi></mjx-math></mjx-container>',
            f"${TEX}$",
        ),
        (WIKIPEDIA, f"${TEX}$"),
        (
            r'<img class="mwe-math-fallback-image-inline" alt="{\displaystyle a}+{b}">',
            r"${\displaystyle a}+{b}$",
        ),
        ('<img class="latex" src="latex.php?latex=x" alt="$x_1*y_2$">', "$x_1*y_2$"),
        ('<img src="https://x.y/equation?tex=x%5E2" alt="x^2">', "$x^2$"),
        (r'<img src="https://latex.codecogs.com/gif.latex?%5Calpha^2">', r"$\alpha^2$"),
        (
            f'<span class="MathJax_CHTML"><span>vst</span><span><math>{FRACTION}</math></span></span>',
            r"$v=\frac{s}{t}$",
        ),
        ('<script type="math/asciimath">sum x</script>', "sum x"),
        (ANNOTATED, f"${TEX}$"),
        (rf'<math class="ltx_Math" alttext="{TEX}">{FRACTION}</math>', f"${TEX}$"),
        (f'<math display="block">{FRACTION}</math>', r"$$v=\frac{s}{t}$$"),
    ],
)
def test_a_formula_is_once_in_the_text_as_tex(html, expected):
    assert text_of(html) == f"a {expected} b"


def test_a_displayed_script_is_a_paragraph_of_its_own():
    page = convert_html(
        rf'<p>one</p><script type="math/tex; mode=display">E = m c^2</script><p>two {KATEX}</p>'.encode()
    )
    assert page.text == f"one\n\n$$E = m c^2$$\n\ntwo ${TEX}$"


@pytest.mark.parametrize(
    "text",
    [
        r"\(v = a_1 * b_2 * c\) and $$x_i^2 < y_j$$",
        r"\[ \alpha \] \_ \# \{ 100\% \\",
        "1. not a list",
        "# not a heading",
        "+ a sum, 5*3*2, _x_, [y](z), `q`",
    ],
)
def test_no_escapes_are_added_to_the_text_of_a_page(text):
    assert convert_html(f"<p>{text.replace('<', '&lt;')}</p>".encode()).text == text


def test_a_backslash_that_a_page_spells_as_an_entity_is_kept():
    assert (
        convert_html(rb"<p>&#92;alpha &#x5C;( &bsol;) &#920; a\b</p>").text
        == "\\alpha \\( \\) Θ a\\b"
    )


def test_code_keeps_its_backslashes_and_a_table_its_bars():
    page = convert_html(rf"<pre>a\(b\) | \n</pre><table><tr><th>a|b<th>{KATEX}</table>".encode())
    assert page.text.startswith("```\na\\(b\\) | \\n\n```") and rf"| a\|b | ${TEX}$ |" in page.text


MATHML = [
    ("<msup><mi>x</mi><mn>10</mn></msup>", "x^{10}"),
    ("<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>", "x_i^2"),
    (
        "<msqrt><mi>a</mi><mo>+</mo><mi>b</mi></msqrt><mroot><mi>x</mi><mn>3</mn></mroot>",
        r"\sqrt{a+b}\sqrt[3]{x}",
    ),
    (
        "<munderover><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover><mi>i</mi>",
        r"\sum_{i=1}^n i",
    ),
    ("<mi>sin</mi><mo>&#x2061;</mo><mi>α</mi><mi>x</mi>", r"\sin\alpha x"),
    ("<mover><mi>x</mi><mo>¯</mo></mover><mover><mi>v</mi><mo>→</mo></mover>", r"\bar{x}\vec{v}"),
    (
        "<mo>(</mo><mtable><mtr><mtd><mi>a</mi></mtd><mtd><mi>b</mi></mtd></mtr><mtr><mtd><mn>0</mn></mtd>"
        "<mtd><mn>1</mn></mtd></mtr></mtable><mo>)</mo>",
        r"(\begin{matrix} a & b \\ 0 & 1 \end{matrix})",
    ),
    (
        "<mi>f</mi><mfenced><mi>x</mi><mi>y</mi></mfenced><mtext>if 5%</mtext>",
        r"f(x,y)\text{if 5\%}",
    ),
    ("<mi>𝑥</mi><mo>−</mo><mi>ℝ</mi><mo>≤</mo><mi>Ω</mi><mi>Α</mi>", r"x-\mathbb{R}\le\Omega A"),
    (
        "<munder><mi>lim</mi><mrow><mi>n</mi><mo>→</mo><mi>∞</mi></mrow></munder>",
        r"\lim_{n\to\infty}",
    ),
    ("<msup><mrow><mi>a</mi><mi>b</mi></mrow><mo>′</mo></msup>", "{ab}^'"),
]


@pytest.mark.parametrize("mathml, tex", MATHML)
def test_mathml_without_tex_is_translated(mathml, tex):
    assert of_mathml(ElementTree.fromstring(f"<math>{mathml}</math>")) == tex
    assert text_of(f"<math>{mathml}</math>") == f"a ${tex}$ b"


def test_a_formula_that_cannot_be_translated_is_counted_and_its_characters_stay():
    chemistry = "<math><mmultiscripts><mi>U</mi><mprescripts/><mn>92</mn><mn>238</mn></mmultiscripts></math>"
    with pytest.raises(Untranslatable):
        of_mathml(ElementTree.fromstring(chemistry))
    page = convert_html(f"<p>of {chemistry} and {KATEX}</p>".encode())
    assert page.text == f"of U92238 and ${TEX}$" and page.dropped == {NO_LAYOUT: 1}


def test_a_drawing_without_mathml_is_read_aloud_and_counted():
    page = convert_html(
        b"<mjx-container><mjx-math></mjx-math><mjx-speech aria-label='v squared'></mjx-speech></mjx-container>"
    )
    assert page.text == "v squared" and page.dropped == {NO_LAYOUT: 1}


@pytest.mark.parametrize(
    "html, expected",
    [
        (f"<table><tr><th>Law<tr><td>{KATEX}</table>", f"| Law |\n| --- |\n| ${TEX}$ |"),
        ("<table><tr><td><math><mo>|</mo><mi>x</mi></math></table>", "| $\\vert x$ |\n| --- |"),
        (f"<ul><li>a {KATEX}<li>b</ul>", f"- a ${TEX}$\n- b"),
        (f"<figure><figcaption>The {KATEX} law</figcaption></figure>", f"The ${TEX}$ law"),
        (f"<p>the <a href=x>law {KATEX}</a> costs $5.</p>", f"the law ${TEX}$ costs $5."),
    ],
)
def test_a_formula_may_be_in_a_table_a_list_a_caption_or_a_link(html, expected):
    assert convert_html(html.encode()).text == expected


def test_formulas_of_a_book_are_those_of_its_chapters(tmp_path):
    chapters = {
        "1.xhtml": chapter(f"<p>b {ANNOTATED}</p>"),
        "2.xhtml": chapter(f"<p>a</p><p>c {MATHJAX3.format('')}</p>"),
    }
    book = convert_epub(write_epub(tmp_path / "a.epub", chapters).read_bytes())
    assert book.text == "a\n\nc $v=\\frac{s}{t}$\n\nb $v = \\frac{s}{t}$"
