import json

import pytest

from benchmarks.vocabulary.results import RESULTS
from benchmarks.vocabulary.table import BEGIN, END, PAGE, with_tables


@pytest.fixture(scope="module")
def results():
    return json.loads(RESULTS.read_text())


def test_the_page_shows_what_was_measured(results):
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text, results) == text, "python -m benchmarks.vocabulary.table"


def test_every_arm_has_its_row(results):
    shown = with_tables(BEGIN + END, results)
    assert all(f"| {arm} |" in shown for arm in results["arms"])


def test_a_page_without_the_markers_is_left_alone(results):
    with pytest.raises(SystemExit, match="has no lines"):
        with_tables("a page", results)
