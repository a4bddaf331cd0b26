"""Kills at moments drawn at random."""

import pytest

from benchmarks.faults.kills import kill_runs
from benchmarks.faults.runs import KINDS


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_plain_trainer_cannot_resume_after_a_kill_in_a_save(suite):
    assert kill_runs(suite.work, system="trainer", stage=0, kills=3)["failed_resumes"] >= 1


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("stage", KINDS)
def test_no_kill_costs_a_resume_a_row_or_a_bit(suite, stage):
    found = kill_runs(suite.work, system="cpt", stage=stage, kills=10)
    assert found["kills"] == 10 and found["inside_saves"] >= 5
    assert [
        found[name] for name in ("failed_resumes", "unfinished", "wrong_samples", "other_weights", "other_losses")
    ] == [0] * 5
