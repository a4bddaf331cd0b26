import lxml.html
import pytest

from cpt.documents.markup import AROUND_THE_TEXT, render, table_text


def text(html, **options):
    return render(lxml.html.document_fromstring(html), **options)


@pytest.mark.parametrize(
    "html, expected",
    [
        ("<p>one\n  two</p><p>three</p>", "one two\n\nthree"),
        ("<h1>A <b>title</b></h1>text<h3>Part</h3>", "# A title\n\ntext\n\n### Part"),
        ("a <i>b</i><!-- no --> c<br>d", "a b c\nd"),
        ("<div>a<div>b</div>c</div>", "a\n\nb\n\nc"),
        ("<a href=x><h2>linked</h2></a>", "## linked"),
        ("<ul><li>a<ul><li>b</ul><li><p>c</p><p>d</p></ul>", "- a\n  - b\n- c d"),
        ("<ol><li>a<li>b</ol>", "1. a\n2. b"),
        ("<ul><li>a</li><ul><li>b</li></ul></ul>", "- a\n  - b"),
        ("<pre>x = 1\n  y = 2\n</pre>", "```\nx = 1\n  y = 2\n```"),
        ("<blockquote><p>a</p><p>b</p></blockquote>", "> a\n>\n> b"),
        ("a<script>no()</script><style>no</style>b", "ab"),
        ("<dl><dt>a<dd>b</dl>", "a\n\nb"),
        ("<ruby>漢<rt>kan</rt></ruby>", "漢"),
    ],
)
def test_how_html_is_written(html, expected):
    assert text(html) == expected


def test_a_table_has_its_rows_between_bars():
    table = "<table><thead><tr><th>a<th>b</thead><tr><td>1</td><td><p>2|3</p></td></tr><tr><td>4</table>"
    assert text(table) == "| a | b |\n| --- | --- |\n| 1 | 2\\|3 |\n| 4 |  |"
    assert table_text([["x"]]) == "| x |\n| --- |"


def test_a_table_that_holds_tables_is_a_layout():
    inner = "<table><tr><td>a<td>b</table>"
    assert text(f"<table><tr><td>menu<td><p>text</p>{inner}</table>") == "menu\n\ntext\n\n| a | b |\n| --- | --- |"


def test_what_stands_around_the_text_can_be_left_out():
    html = "<nav>menu</nav><p>text</p><footer>rights</footer>"
    assert text(html) == "menu\n\ntext\n\nrights" and text(html, skip=AROUND_THE_TEXT) == "text"
