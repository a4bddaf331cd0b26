import pytest

from benchmarks.measurement import measurement


@pytest.mark.parametrize(("target", "met"), [(9.0, True), (8.9, False), (None, None)])
def test_a_measurement_is_the_median_with_quartiles_beside_its_target(target, met):
    row = measurement("stall", target, [1.0, 2.0, 9.0, 11.0, 300.0], "%")
    assert (row["measured"], row["quartiles"], row["met"]) == (9.0, [2.0, 11.0], met)
