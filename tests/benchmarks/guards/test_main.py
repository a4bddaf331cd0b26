import pytest

from benchmarks.guards.__main__ import added, results_of


def samples(guarded, free, *, drift=0.0):
    return [
        {"guarded": step % 2 == 1, "wall": seconds + drift * step, "processor": seconds + drift * step}
        for step, seconds in enumerate([free, guarded] * 20)
    ]


def test_the_cost_of_a_guarded_step_is_that_above_its_neighbours():
    assert {round(seconds, 9) for seconds in added(samples(0.202, 0.2, drift=0.001), "wall")} == {0.002}


def test_the_target_is_met_by_the_share_of_a_larger_models_step():
    for guarded, met in ((0.0105, True), (0.012, False)):
        by_size = {"small": samples(guarded, 0.01), "medium": samples(0.2, 0.2)}
        first = results_of({"one process": by_size})["measurements"][0]
        assert first["met"] is met and first["measured"] == pytest.approx(100 * (guarded - 0.01) / 0.2)
