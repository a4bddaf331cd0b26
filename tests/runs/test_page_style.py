import re

from cpt.runs.page import Code, Facts, Section, Table, html_page
from cpt.runs.page_style import DRAW, STYLE
from cpt.runs.plots import Curve, Plot


def test_each_class_of_a_page_has_its_style():
    parts = [
        Facts([("a", "b" * 90)]),
        Plot("p", "x", "y", [Curve("c", [0, 1], [0, 1])]),
        Table(["n"], [["1"]]),
        Table(["n"], [["1"]], has_texts=True),
        Code("c", "d"),
    ]
    page = html_page("x", [Section("y", parts)], "lead")
    body = page[page.index("<body>") : page.index("<script>")]
    used = {name for names in re.findall(r'class="([^"]+)"', body) for name in names.split()}
    assert used == {"lead", "long", "plots", "plot", "table", "texts", "number"}
    assert all(f".{name} " in STYLE for name in used)


def test_each_colour_that_is_used_is_defined_for_light_and_dark():
    used = set(re.findall(r"var\((--\w+)\)", STYLE)) | set(re.findall(r'colour\("(--\w+)"\)', DRAW))
    assert used and all(STYLE.count(f"{name}:") == 2 for name in used)


def test_neither_closes_its_element_nor_fetches():
    assert "</" not in STYLE + DRAW and "http" not in STYLE + DRAW and "url(" not in STYLE
