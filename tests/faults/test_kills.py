"""Kills at moments drawn at random."""

import random

import pytest

from benchmarks.faults.kills import ELSE, Killed, judge, kill_one_run, kill_runs, moment_of, save_times, slow_run, total
from benchmarks.faults.slow_disk import Operation


def test_a_kill_is_told_by_the_rarest_operation_that_had_not_ended():
    done = [Operation(1.0, 2.0, "write", "a"), Operation(2.0, None, "write", "b"), Operation(2.0, None, "hash", "a")]
    assert moment_of(done, is_half_written=True) == "hash"
    assert moment_of(done[:1], is_half_written=True) == ELSE
    assert moment_of(done[:1], is_half_written=False) == "between saves"


def test_the_rename_that_publishes_is_told_from_those_of_single_files():
    of_a_file = Operation(1.0, None, "rename", "/runs/.saving/checkpoint-3/model.safetensors")
    of_all = Operation(1.0, None, "rename", "/runs/checkpoint-3")
    assert [moment_of([one], is_half_written=True) for one in (of_a_file, of_all)] == ["rename", "rename that publishes"]


def test_what_several_runs_came_to_is_added_up():
    parts = [Killed(kills=2, inside_saves=1, moments={"write": 1}), Killed(kills=3, inside_saves=3, moments={"write": 2, "sync": 1})]
    whole = total(parts)
    assert (whole.kills, whole.inside_saves, whole.moments) == (5, 4, {"write": 3, "sync": 1})


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_killed_in_a_save_goes_on_and_the_plain_trainers_stays_blocked(suite):
    found = {}
    for system in ("cpt", "trainer"):
        straight = slow_run(suite.work, "straight", system, 0).straight()
        run, found[system] = slow_run(suite.work, "killed", system, 0), Killed()
        assert min(save_times(straight)) >= 2
        kill_one_run(run, 2, min(save_times(straight)), random.Random(1), found[system])
        judge(run, straight, found[system])
    assert found["cpt"].kills == 2 and found["cpt"].failed_resumes == 0 and found["cpt"].inside_saves >= 1
    assert (found["cpt"].wrong_samples, found["cpt"].other_weights, found["cpt"].other_losses) == (0, 0, 0)
    assert found["trainer"].failed_resumes >= 1


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_no_kill_costs_a_resume_a_row_or_a_bit(suite, stage):
    found = kill_runs(suite.work, system="cpt", stage=stage, kills=10, workers=1)
    assert found["kills"] == 10 and found["inside_saves"] >= 5
    assert [found[name] for name in ("failed_resumes", "unfinished", "wrong_samples", "other_weights", "other_losses")] == [0] * 5
