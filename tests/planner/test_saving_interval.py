import math

import pytest

from cpt.planner.saving_interval import FAILURES_PER_GPU_HOUR, Saving, saving_of

GIB = 2**30


def test_the_rate_is_that_of_llama_3():
    hours = 1 / (FAILURES_PER_GPU_HOUR * 16_384)
    assert hours == pytest.approx(3.1, abs=0.05), "one in about three hours"
    # Meta's research clusters: 6.50 and 2.34 failures in 1,000 days of 8 GPUs
    assert 2.34 / 1000 / 24 / 8 < FAILURES_PER_GPU_HOUR < 6.50 / 1000 / 24 / 8


def test_small_costs_are_saved_as_young_says():
    saving = Saving(10, 10, 1e6, 600)
    assert saving.best_interval == pytest.approx(math.sqrt(2 * 10 * 1e6), rel=0.01)


@pytest.mark.parametrize("cost", [1.0, 30.0, 600.0, 3000.0])
def test_no_other_interval_leaves_more_time(cost):
    saving = Saving(cost, cost, 20_000, 600)
    best = saving.effective(saving.best_interval)
    assert all(
        saving.effective(factor * saving.best_interval) <= best + 0.005 for factor in (0.3, 0.5, 0.8, 1.25, 2, 3)
    )


def test_one_save_is_over_before_the_next():
    assert Saving(500, 0.1, 10_000, 600).best_interval == 500
    assert Saving(500, 500, 100, 600).best_interval == 500, "saving takes longer than anything runs"


def test_in_the_background_only_the_copy_stands_still():
    sizes = {"gpus": 16, "writers": 2, "gigabytes": 1.0}
    beside, blocking = saving_of(100e9, in_background=True, **sizes), saving_of(100e9, in_background=False, **sizes)
    assert blocking.stands_still == blocking.writes == beside.writes == 50
    assert beside.stands_still == pytest.approx(100e9 / 16 / 22e9)
    assert beside.effective(600) > blocking.effective(600)


def test_one_that_writes_alone_has_all_of_it():
    assert saving_of(100e9, gpus=16, writers=1, gigabytes=1.0, in_background=True).stands_still == pytest.approx(
        100e9 / 22e9
    )


def test_more_gpus_fail_more_often_and_who_knows_better_says_so():
    sizes = {"writers": 2, "gigabytes": 1.0, "in_background": False}
    few, many = saving_of(1e9, gpus=16, **sizes), saving_of(1e9, gpus=160, **sizes)
    assert few.between_failures == pytest.approx(10 * many.between_failures)
    assert saving_of(1e9, gpus=16, hours_between_failures=5, **sizes).between_failures == 5 * 3600


def test_what_costs_nothing_is_not_saved_all_the_time():
    assert saving_of(0.0, gpus=8, writers=1, gigabytes=1.0, in_background=True).best_interval >= 1
