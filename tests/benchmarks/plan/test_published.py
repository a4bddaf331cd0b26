import statistics

import pytest

from benchmarks.plan.published import BEGIN, END, PAGE, error, part
from benchmarks.plan.published_runs import SPEEDS, WHOLE
from cpt.planner.speed import ASSUMED_MFU

RUNS = (*SPEEDS, *WHOLE)


@pytest.mark.parametrize("run", [run for run in RUNS if run.utilization is not None], ids=lambda run: run.name)
def test_at_the_share_that_its_authors_give_a_run_is_planned_within_a_sixth(run):
    assert -0.01 <= error(run, run.utilization) <= 1 / 6


@pytest.mark.slow
def test_at_the_assumed_share_most_are_within_the_range_that_the_page_tells():
    errors = [error(run, ASSUMED_MFU) for run in RUNS]
    assert statistics.median(abs(each) for each in errors) < 0.25
    assert sum(-0.5 < each < 0.25 for each in errors) >= len(errors) - 1, "one run lost half of its hours"


@pytest.mark.slow
def test_the_page_has_what_the_command_writes():
    text = PAGE.read_text()
    assert text.partition(BEGIN)[2].partition(END)[0] == part()


def test_every_run_says_where_its_figures_stand():
    assert all(run.source and run.rate > 0 for run in RUNS) and len(RUNS) >= 20
