import numpy as np
import pytest

from cpt.search.range_curve import curve_of, plot_curve

RATES = np.logspace(-5, 0, 200)


def curve_from(losses, rates=RATES):
    return curve_of(rates, np.asarray(losses), 200)


def diverging(noise=0.0):
    """Falls from 6, lowest at 1e-2, rises from there."""
    shape = 6 - 3 / (1 + (1e-3 / RATES)) + 300 * np.maximum(0, RATES - 1e-2) ** 2
    return shape + noise * np.random.default_rng(0).standard_normal(200)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_suggested_peak_is_a_tenth_of_where_the_loss_was_lowest(noise):
    curve = curve_from(diverging(noise))
    lowest, diverges = (float(RATES[index]) for index in (curve.lowest, curve.diverges))
    assert 5e-3 < lowest < 6e-2 < diverges < 3e-1
    assert curve.suggested == pytest.approx(lowest / 10, rel=0.05) and curve.steepest < curve.lowest


def test_where_nothing_diverged_nothing_is_suggested():
    assert curve_from(6 - np.linspace(0, 2, 200)).suggested is None


def test_a_loss_that_only_rises_is_no_error():
    curve = curve_from(np.linspace(2, 9, 200))
    assert curve.lowest == 0 and curve.steepest == 0 and curve.suggested == pytest.approx(1e-6)


def test_smoothing_begins_at_the_first_loss():
    curve = curve_from(np.full(30, 4.0), RATES[:30])
    assert curve.smoothed == pytest.approx(np.full(30, 4.0))


def test_the_picture_is_written(tmp_path):
    plot_curve(curve_from(diverging()), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[1:4] == b"PNG"
