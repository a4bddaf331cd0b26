import json

import pytest

from benchmarks.data.page import BEGIN, END, PAGE, side_by_side, table, tables, target_table, with_tables
from benchmarks.data.results import RESULTS
from benchmarks.data.systems import SYSTEMS


@pytest.fixture(scope="module")
def results():
    return json.loads((RESULTS / "data.json").read_text())


def test_the_page_shows_what_was_measured(results):
    text = PAGE.read_text()
    assert with_tables(text, results) == text, "python -m benchmarks.data.page"


def test_every_system_has_its_row(results):
    shown = side_by_side(results)
    for system in SYSTEMS.values():
        assert f"| {system.title} |" in shown


def test_a_system_that_failed_says_why(results):
    failed = {"title": "Slow one", "version": "1.0", "megabytes": 64.0, "failed": "does not install: no wheel"}
    shown = side_by_side({**results, "systems": {**results["systems"], "trl": failed}})
    assert "| Slow one | 1.0 | 64 | not measured: does not install: no wheel |" in shown


def test_what_else_failed_is_told(results):
    assert tables({**results, "failures": {"shuffle": "it crashed"}}).endswith("\nNot measured: shuffle: it crashed\n")


def test_a_missed_target_is_told():
    rows = [
        {"name": "speed", "target": ">= 10", "measured": 7.123, "unit": "times", "met": False},
        {"name": "resume", "target": "<= 1", "measured": 0.1, "unit": "s", "met": True},
        {"name": "told elsewhere", "target": None, "measured": 3.0, "unit": "times", "met": None},
    ]
    shown = target_table({"measurements": rows})
    assert "| speed | >= 10 times | 7.12 | **no** |" in shown
    assert "| resume | <= 1 s |  | yes |" in shown
    assert "told elsewhere" not in shown


def test_only_what_stands_between_the_markers_changes(results):
    text = f"before\n{BEGIN}old\n{END}after\n"
    assert with_tables(text, results) == f"before\n{BEGIN}{tables(results)}{END}after\n"


def test_a_readme_without_markers_is_refused(results):
    with pytest.raises(SystemExit, match="has no lines"):
        with_tables("# cpt\n", results)


def test_a_table_has_a_rule_below_its_heads():
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |\n"
