import math

import numpy as np
import pytest

from cpt.probe.law import Curve, Interval, fit_law, saturating


def rates_of(peak, steps):
    """Warm up over a tenth, then a cosine to a tenth of the peak."""
    at = np.arange(1, steps + 1) / steps
    return peak * np.where(at < 0.1, at / 0.1, 0.1 + 0.45 * (1 + np.cos(math.pi * (at - 0.1) / 0.9)))


def run_of(share, peak, steps):
    return Curve(share, rates_of(peak, steps), np.arange(steps // 8, steps + 1, steps // 8), np.empty(0))


def measured(curve, truth, generator, noise):
    """The published law: one shift for each share of replay, an old trajectory, annealing, and noise."""
    shift, speed, power, annealing, old = truth
    units = 0.002 * 40  # of the areas, so that the parameters are about 1
    far = curve.forward(1.0) / units
    clean = shift * (1 - curve.share) * saturating(far, speed, power) - annealing * curve.annealing(0.9) / 0.002
    clean += old * ((3 + far) ** -0.5 - 3**-0.5)
    scale = noise * np.abs(clean).max()
    return Curve(curve.share, curve.rates, curve.steps, clean + scale * generator.standard_normal(len(clean)))


GRID = [run_of(share, peak, 40) for share in (0.05, 0.25) for peak in (0.0007, 0.002)]


def covered(truth, seed, noise=0.01):
    """Whether the interval of a run five times as long holds what it measures."""
    generator = np.random.default_rng(seed)
    law = fit_law([measured(curve, truth, generator, noise) for curve in GRID])
    whole = measured(run_of(0.05, 0.002, 200), truth, generator, noise)
    return law.forecast(whole)[-1].holds(whole.changes[-1])


def test_the_forward_area_is_the_sum_of_the_rates():
    curve = Curve(0.0, np.array([1.0, 2.0, 1.0]), np.array([2, 3]), np.empty(0))
    assert curve.forward(1.0).tolist() == [3.0, 4.0]
    assert curve.forward(0.0).tolist() == [1.5, 2.0]  # in units of the peak


def test_the_annealing_area_sums_falls_that_fade():
    curve = Curve(0.0, np.array([1.0, 1.0, 0.5, 0.5]), np.array([1, 2, 3, 4]), np.empty(0))
    # falls -1, 0, 0.5, 0; with a fading of 0.5 the momentum is -1, -0.5, 0.25, 0.125
    assert curve.annealing(0.5).tolist() == [-1.0, -1.5, -1.25, -1.125]


def test_an_interval_holds_its_ends():
    assert Interval(2.0, 1.9, 2.1).holds(2.1) and not Interval(2.0, 1.9, 2.1).holds(2.11)


def test_the_law_forecasts_a_run_five_times_as_long():
    assert covered((-0.4, 10.0, 0.3, 0.01, 0.2), seed=0)
    assert covered((0.2, 2.0, 1.0, 0.02, 0.0), seed=1)


def test_an_interval_becomes_wider_with_the_distance():
    generator, truth = np.random.default_rng(0), (-0.4, 2.0, 0.5, 0.01, 0.2)
    law = fit_law([measured(curve, truth, generator, 0.02) for curve in GRID])
    near, far = (law.forecast(run_of(0.05, 0.002, steps))[-1] for steps in (40, 400))
    assert far.high - far.low > 2 * (near.high - near.low)


def test_noise_alone_identifies_no_shift():
    generator = np.random.default_rng(0)
    readings = [Curve(c.share, c.rates, c.steps, 0.001 * generator.standard_normal(len(c.steps))) for c in GRID]
    law = fit_law(readings)
    assert law.identified() == {
        "annealing": False,
        "old trajectory": False,
        "shift at 5 % replay": False,
        "shift at 25 % replay": False,
    }
    assert law.forecast(run_of(0.05, 0.002, 80))[-1].holds(0.0)


@pytest.mark.long
def test_intervals_cover_the_truth_at_about_the_stated_rate():
    """Truths drawn from the published law, none of them on the grid."""
    draw = np.random.default_rng(7)
    held = []
    for seed in range(100):
        sign = -1 if seed % 2 else 1
        shift, speed, power = (
            sign * draw.uniform(0.1, 0.5),
            math.exp(draw.uniform(math.log(0.5), math.log(50))),
            draw.uniform(0.2, 1.5),
        )
        held.append(covered((shift, speed, power, draw.uniform(0, 0.02), draw.uniform(0, 0.3)), seed))
    assert 0.84 <= np.mean(held) <= 0.99, np.mean(held)
