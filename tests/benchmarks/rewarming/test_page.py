import json

import pytest

from benchmarks.rewarming.page import BEGIN, END, PAGE, arms_table, reading, with_reach, with_tables
from benchmarks.rewarming.results import RESULTS
from benchmarks.rewarming.training import ARMS, BASE


@pytest.fixture(scope="module")
def results():
    return json.loads(RESULTS.read_text())


def test_the_page_shows_what_was_measured(results):
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text, results) == text, "python -m benchmarks.rewarming.page"


def test_every_arm_of_every_shift_has_its_row(results):
    for shift in results["shifts"]:
        rows = arms_table(results, shift["name"]).splitlines()[2:]
        assert [row.split(" | ")[0] for row in rows] == [f"| {arm}" for arm in (BASE, *ARMS)]


def test_a_page_without_the_markers_is_left_alone(results):
    with pytest.raises(SystemExit, match="has no lines"):
        with_tables(BEGIN, results)
    assert with_tables(BEGIN + END, results).count("| claim |") == 1


@pytest.mark.parametrize(
    ("mean", "reach", "target", "met", "said"),
    [
        (-0.2, 0.1, "< 0", True, "yes"),
        (0.2, 0.1, "< 0", False, "**the opposite**"),
        (0.1, 0.2, "< 0", None, "not told from seed noise"),
        (0.2, None, "> 0", None, "not told from seed noise"),
        (0.2, 0.1, None, None, "higher (worse)"),
    ],
)
def test_a_difference_is_read_by_its_interval(mean, reach, target, met, said):
    assert reading({"mean": mean, "reach": reach, "target": target, "met": met}) == said


def test_a_figure_of_one_seed_has_no_interval():
    assert with_reach({"mean": 2.0, "reach": None}, "{:+.4f}") == "+2.0000"
    assert with_reach({"mean": 2.0, "reach": 0.25}, "{:+.2f}") == "+2.00 ± 0.25"
