import re
import sys
from html.parser import HTMLParser

from cpt.runs.page import Code, Facts, Listing, Section, Table, html_page
from cpt.runs.plots import Curve, Plot

PLOT = Plot("Loss", "tokens", "loss", [Curve("loss", [0, 1], [2, 1])])
VOID = {"meta"}


class Read(HTMLParser):
    """Whether each element is closed where it should be, and the visible text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.elements, self.words, self.is_closed = [], [], [], True
        self.feed(page)
        self.is_closed &= not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        self.is_closed &= bool(self.open) and self.open.pop() == tag

    def handle_data(self, data):
        if "script" not in self.open and "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


def count(read, tag, **attributes):
    return sum(name == tag and attributes.items() <= found.items() for name, found in read.elements)


def test_each_part_is_there_as_text():
    facts, table = (
        Facts([("tokens", "1,234")]),
        Table(["set", "loss"], [["code", "1.5"], ["prose", "2.5"]], caption="Sets"),
    )
    sections = [
        Section("", [facts]),
        Section("Results", ["One.\n\nTwo.", table, Listing(["a", "b"]), Code("x: 1"), Code("y: 2", "folded")]),
    ]
    read = Read(html_page("a run", sections, "It worked."))
    assert read.is_closed
    for word in ("a run", "It worked.", "1,234", "Results", "Sets", "prose", "x: 1", "folded"):
        assert word in read.text
    assert (count(read, "tr"), count(read, "li"), count(read, "details"), count(read, "pre")) == (3, 2, 1, 2)


def test_whatever_stands_in_a_text_stays_text():
    bad = "</script><script>alert(1)</script> & 😀 \ud800"
    parts = [bad, Facts([(bad, bad)]), Table([bad], [[bad]], bad), Listing([bad]), Code(bad, bad)]
    parts.append(Plot(bad, bad, bad, [Curve(bad, [0, 1], [0, 1])], marks=[(0, bad)], note=bad))
    read = Read(html_page(bad, [Section(bad, parts)], bad))
    assert read.is_closed and count(read, "script") == 3  # the figure, plotly, what draws
    assert read.text.count("<script>alert(1)</script> & 😀 ?") >= 10


def test_plotly_stands_in_the_page_once_however_many_plots_there_are():
    few, many = (html_page("x", [Section("y", [PLOT] * number)]) for number in (1, 5))
    assert 0 < len(many) - len(few) < 20_000 and few.count("Plotly.react") == 1


def test_a_page_without_plots_needs_no_plotly(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    assert len(html_page("x", [Section("y", ["text"])])) < 20_000


def test_nothing_is_fetched_and_the_browser_is_told_so():
    page = html_page("x", [Section("y", ["text"])])
    assert "default-src 'none'" in page and not re.search(r'(src|href)="(?!#)', page)


def test_sections_without_parts_are_left_out():
    page = html_page("x", [Section("empty one", []), Section("full one", ["text"])])
    assert "empty one" not in page and "full one" in page


def test_columns_of_numbers_stand_to_the_right():
    rows = [["code", "1,234", "-3.2 to +4.5 %", "1.2 ± 0.1", ""], ["12 monkeys", "5", "", "2", ""]]
    cells = re.findall(r"<td([^>]*)>", html_page("x", [Section("y", [Table(list("abcde"), rows)])]))
    assert [bool(cell) for cell in cells] == [False, True, True, True, False] * 2


def test_long_texts_carry_their_columns_name_for_narrow_screens():
    page = html_page("x", [Section("y", [Table(["prompt", "after"], [["def", "main()"]], has_texts=True)])])
    assert '<td data-column="after"><div>main()</div></td>' in page


def test_a_row_that_is_too_short_does_no_harm():
    assert "only" in html_page("x", [Section("y", [Table(["a", "b"], [["only"], []])])])
