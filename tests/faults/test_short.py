"""The short part of the suite: real runs, forked from one process that has everything imported, meet four faults."""

import os
import time
from multiprocessing import get_context

import pytest

from benchmarks.faults.comparing import same_losses, same_weights, wrong_samples
from benchmarks.faults.damage import copy_until, files_of
from benchmarks.faults.runs import ROOT, TrialRun, prepare
from tests.tiny_run import damage

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["cpt.train", "benchmarks.faults.stage"])


def train_here(recipe, environment, seconds_per_sync):
    """The body of a child: the run, on a disk whose syncs take their time."""
    os.environ.update(environment)
    os.chdir(ROOT)
    from cpt.recipe.load import load_recipe
    from cpt.train import train

    sync = os.fsync
    os.fsync = lambda descriptor: (time.sleep(seconds_per_sync), sync(descriptor))
    train(load_recipe(recipe))


def started(run, faults=(), seconds_per_sync=0.0):
    child = FORKS.Process(target=train_here, args=(run.recipe, run.told(faults), seconds_per_sync))
    child.start()
    return child


def finished(run, faults=()):
    child = started(run, faults)
    child.join(120)
    return child.exitcode


@pytest.fixture(scope="module")
def straight(tmp_path_factory, module_suite):
    run = TrialRun(module_suite, "straight", steps=8, every=2)
    assert finished(run) == 0
    return run


@pytest.fixture(scope="module")
def module_suite(tmp_path_factory):
    work = tmp_path_factory.mktemp("faults")
    prepare(work)
    return work


def test_killed_in_the_middle_of_a_save_it_goes_on_as_if_nothing_had_been(module_suite, straight):
    run = TrialRun(module_suite, "killed", steps=8, every=2)
    child = started(run, seconds_per_sync=0.1)
    give_up = time.monotonic() + 120
    while not (run.folder / ".saving" / "checkpoint-4").exists():
        assert child.is_alive() and time.monotonic() < give_up
        time.sleep(0.01)
    child.kill()
    child.join()
    assert (run.folder / ".saving" / "checkpoint-4").exists() and run.checkpoints() == [2]
    assert finished(run) == 0
    assert wrong_samples(run, straight) == 0 and same_losses(run, straight) and same_weights(run, straight)
    assert min(run.attempts_made()[1]) == 3


def test_a_flipped_bit_costs_the_steps_since_the_checkpoint_before_it(module_suite, straight):
    run = TrialRun(module_suite, "damaged", steps=8, every=2)
    copy_until(straight, run, 6)
    damage(run.folder / "checkpoint-6" / "optimizer.pt", "bit flip")
    assert finished(run) == 0
    assert [event["kind"] for event in run.events()] == ["quarantined"]
    assert min(run.made()) == 5 and same_weights(run, straight)


def test_a_loss_that_is_no_number_costs_its_own_step(module_suite):
    run = TrialRun(module_suite, "nan", steps=8, every=4)
    assert finished(run, [{"kind": "nan", "steps": [5]}]) == 0
    assert [(event["kind"], event["step"]) for event in run.events()] == [("nan_skipped", 5)]
    assert all(tensor.isfinite().all() for tensor in run.weights().values())


def test_a_finished_run_is_left_alone(straight):
    before = {name: (straight.folder / name).read_bytes() for name in files_of(straight.folder)}
    assert finished(straight) == 0
    assert {name: (straight.folder / name).read_bytes() for name in files_of(straight.folder)} == before
