"""Kills at moments drawn at random."""

import random
import time

import pytest

from benchmarks.faults.kills import Killed, judge, kill_one_run, kill_runs, slow_run
from benchmarks.faults.moments import Timetable, save_times
from benchmarks.faults.runs import KINDS


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_killed_in_a_save_goes_on_and_the_plain_trainers_stays_blocked(suite):
    found = {}
    for system in ("cpt", "trainer"):
        straight, began = slow_run(suite.work, "straight", system, 0), time.monotonic()
        timetable = Timetable.of(straight.straight(), began)
        run, found[system] = slow_run(suite.work, "killed", system, 0), Killed()
        assert min(save_times(straight)) >= 2
        kill_one_run(run, 2, timetable, random.Random(1), found[system])
        judge(run, straight, found[system])
    assert found["cpt"].kills == 2 and found["cpt"].failed_resumes == 0 and found["cpt"].inside_saves >= 1
    assert (found["cpt"].wrong_samples, found["cpt"].other_weights, found["cpt"].other_losses) == (0, 0, 0)
    assert found["trainer"].failed_resumes >= 1


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("stage", KINDS)
def test_no_kill_costs_a_resume_a_row_or_a_bit(suite, stage):
    found = kill_runs(suite.work, system="cpt", stage=stage, kills=10, workers=1)
    assert found["kills"] == 10 and found["inside_saves"] >= 5
    assert [
        found[name] for name in ("failed_resumes", "unfinished", "wrong_samples", "other_weights", "other_losses")
    ] == [0] * 5
