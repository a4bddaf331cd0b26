"""Each fault in real runs: ours come out of it as they should. The plain Trainer's part is the benchmark's."""

import pytest

from benchmarks.faults.bad_steps import FAULTS as STEPS
from benchmarks.faults.damage import DAMAGED, EVERY, chosen, files_of, started
from benchmarks.faults.damage import STEPS as STEPS_OF_DAMAGED
from benchmarks.faults.disks import FAULTS as DISKS
from benchmarks.faults.disks import may_mount
from benchmarks.faults.goodput import disturb_jobs
from benchmarks.faults.processes import FAULTS as PROCESSES
from benchmarks.faults.results import of_time
from benchmarks.faults.runs import KINDS
from benchmarks.faults.signals import NUMBERS, TARGETS, signalled
from benchmarks.faults.trials import Suite
from tests.tiny_run import DAMAGES

IN_EVERY_KIND = pytest.mark.parametrize("stage", KINDS)


@pytest.mark.long
@pytest.mark.timeout(1800)
@IN_EVERY_KIND
@pytest.mark.parametrize("fault", STEPS)
def test_a_bad_step_costs_no_more_than_it_must(suite, stage, fault):
    outcome = STEPS[fault](suite, "cpt", stage)
    assert outcome.good, outcome.what


@pytest.mark.long
@pytest.mark.timeout(1800)
@IN_EVERY_KIND
@pytest.mark.parametrize("fault", PROCESSES)
def test_processes_that_die_stand_still_or_change_in_number_cost_no_row(suite, stage, fault):
    outcome = PROCESSES[fault](suite, "cpt", stage)
    assert outcome.good, outcome.what


@pytest.mark.long
@pytest.mark.timeout(1800)
@IN_EVERY_KIND
@pytest.mark.parametrize("fault", DISKS)
def test_a_disk_that_takes_nothing_costs_no_checkpoint(suite, stage, fault):
    if not may_mount(suite.work):
        pytest.skip("mounting a disk in memory is not allowed here")
    outcome = DISKS[fault](suite, "cpt", stage)
    assert outcome.good, outcome.what


@pytest.mark.long
@pytest.mark.timeout(1800)
@IN_EVERY_KIND
def test_a_signal_to_anyone_saves_and_goes_on(suite, stage):
    for number, (name, send) in zip(NUMBERS, TARGETS.items(), strict=True):
        outcome = signalled(suite, "cpt", stage, 2, number, send)
        assert outcome.good, (number.name, name, outcome.what)


@pytest.mark.long
@pytest.mark.timeout(1800)
@IN_EVERY_KIND
def test_damage_to_any_file_in_any_way(suite, stage):
    straight = suite.straight("damage", "cpt", stage, steps=STEPS_OF_DAMAGED, every=EVERY)
    names = files_of(straight.folder / f"checkpoint-{DAMAGED}")
    assert len(names) >= 10
    for how in DAMAGES:
        assert all(outcome.good for outcome in chosen(straight, names, how))
        outcome = started(suite, straight, names[DAMAGES.index(how)], how)
        assert outcome.good, (names[DAMAGES.index(how)], how, outcome.what)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_supervised_job_whose_processes_are_killed_ends_well_and_in_time(suite):
    (row,) = disturb_jobs(Suite(suite.work, stages=(0,)))
    assert not row["jobs"][0]["failed"] and row["jobs"][0]["failures"] >= 1
    assert all(measured["met"] is not False for measured in of_time([row]))
