"""The law of loss in continued pre-training, fitted to short runs, and forecasts from it with intervals.

The law (Wang et al. 2025, "Learning Dynamics in Continual Pre-Training for Large Language Models",
arxiv.org/abs/2505.07796) takes a held-out loss at step t as that of the old trajectory plus a shift towards that of
the new data:

    L(t) = L0 + A (S1_pt + S1)^-alpha - C1 S2_pt - C2 S2  +  B (1 - (1 + E S1)^-beta)

S1 is the forward area, the sum of the learning rates of the steps so far, and S2 the annealing area, the sum over
steps of the rate's falls, each fading by a factor lambda a step (arxiv.org/abs/2408.11029). B depends on how far the
new data are from the old, so on the share of replay. Here each share has its own B, and E may in addition go with the
share of new text in what is read; the old trajectory may go on with every step, or only as far as old text is read.

A base's S1_pt and S2_pt are seldom published, and they are constants. So it is the change since the first step that is
fitted, which is
measured exactly: L0, C1 and S2_pt drop out, and what is left of the second term is A ((S1_pt + S1)^-alpha -
S1_pt^-alpha), with S1_pt in units of the longest probe's S1 and alpha = 1/2.

Two things are freer here than in the law as published, which is a member of what is fitted. There the peak learning
rate acts through S1 alone; here S1 and B may each go with a power of it: runs of a small model at a third of the rate
were not three times as slow (docs/probe.md).

Few short runs do not tell all parameters apart. So none is chosen: every combination on a grid of the shape's
parameters is fitted (it is linear in A, B and C2), weighs by how well it explains the readings (its evidence), and has
its say in the forecast in that proportion. Where the readings leave the shape open, the interval becomes wide by
itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

LEVEL = 0.9  # of the intervals
RATE_POWERS = (0.0, 0.5, 1.0)  # S1 goes with the peak learning rate to this power; the law as published has 1
SIZES = (0.0, 0.5)  # B goes with the peak learning rate to this power; the law as published has 0
SPEEDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # E, times the longest S1 of a short run
POWERS = (0.1, 0.2, 0.4, 0.7, 1.0, 2.0)  # beta
WITH_SHARE = (0.0, 1.0)  # E goes with (1 - share) to this power
OLD = ((0.0, 0.0), (3.0, 0.0), (3.0, 1.0))
# S1_pt over the longest S1 of a short run (0: no such term), and whether S1 counts there by the share of replay (1) or
# whole (0)
FADING = (0.5, 0.8, 0.9, 0.97, 0.999)  # lambda; the papers have 0.99 to 0.999, for runs of many more steps
NOISE = (
    0.003,
    0.006,
    0.0125,
    0.025,
    0.05,
    0.1,
    0.2,
)  # standard deviation of a reading, as a share of its run's largest change
CALM = 0.1  # a run that hardly changes has the noise of one that changes by so much of the largest change of all
WANDERING = (
    0.0,
    1.0,
    4.0,
)  # variance that a run's own way off the law has gathered by the end of the longest, over that of a reading
PRIOR = 3.0  # standard deviation of what a term may contribute to the longest run, over the largest change
# of the evidence: readings on one curve are not independent witnesses of its shape, and the truth is on no grid
CREDENCE = 0.5
TOO_UNLIKELY = 1e-6  # members of less weight than this, against the best, have no say

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One run as the law sees it."""

    share: float
    """Of replay."""
    rates: Floats
    """The learning rate of each step."""
    steps: NDArray[np.int64]
    """After which it was measured, or is to be forecast; none is 0."""
    changes: Floats
    """Bits per byte less those before the first step; empty of a run that is to be forecast."""

    @property
    def peak(self) -> float:
        """The highest learning rate."""
        return float(self.rates.max())

    def forward(self, rate_power: float) -> Floats:
        """S1 at the steps."""
        areas: Floats = np.cumsum(self.rates)[self.steps - 1] * self.peak ** (rate_power - 1)
        return areas

    def annealing(self, fading: float) -> Floats:
        """S2 at the steps; the rate is taken to have ended near 0 before the first."""
        falls = -np.diff(self.rates, prepend=0.0)
        momentum, area, areas = 0.0, 0.0, np.empty(len(falls))
        for step, fall in enumerate(falls):
            momentum = fading * momentum + fall
            area += momentum
            areas[step] = area
        return areas[self.steps - 1]


@dataclass(frozen=True)
class Interval:
    """A forecast."""

    middle: float
    low: float
    high: float
    level: float = LEVEL

    def holds(self, value: float) -> bool:
        """The value lies inside."""
        return self.low <= value <= self.high


class Shapes:
    """The grid of the law's nonlinear parameters, in units of the runs that were read."""

    def __init__(self, curves: Sequence[Curve]) -> None:
        self.shares = sorted({curve.share for curve in curves})
        self.largest = max(1e-9, *(float(np.abs(curve.changes).max()) for curve in curves))
        self.most_steps = max(int(curve.steps.max()) for curve in curves)
        self.highest = max(curve.peak for curve in curves)
        self.longest = {power: max(float(curve.forward(power).max()) for curve in curves) for power in RATE_POWERS}
        self.annealed = {
            fading: max(float(np.abs(curve.annealing(fading)).max()) for curve in curves) for fading in FADING
        }

    def terms(self, curve: Curve) -> Floats:
        """[shape, reading, term] What stands beside the linear coefficients: C2, A, and B of each share."""
        shifts = list(product(RATE_POWERS, SIZES, SPEEDS, POWERS, WITH_SHARE))
        terms = np.zeros((len(shifts), len(OLD), len(FADING), len(curve.steps), 2 + len(self.shares)))
        for number, fading in enumerate(FADING):
            terms[:, :, number, :, 0] = -curve.annealing(fading) / self.annealed[fading]
        for place, (rate_power, size, speed, power, with_share) in enumerate(shifts):
            for number, (earlier, by_replay) in enumerate(OLD):
                if earlier:
                    along = self.far(curve, min(rate_power, 1.0)) * curve.share**by_replay
                    terms[place, number, :, :, 1] = saturating(along, 1 / earlier, 0.5)
            shifted = saturating(self.far(curve, rate_power), speed * (1 - curve.share) ** with_share, power)
            scale = (curve.peak / self.highest) ** size / saturating(np.ones(1), speed, power)
            terms[place, :, :, :, 2 + self.shares.index(curve.share)] = shifted * scale
        return terms.reshape(-1, *terms.shape[-2:])

    def far(self, curve: Curve, rate_power: float) -> Floats:
        """S1 over the longest that was read."""
        return curve.forward(rate_power) / self.longest[rate_power]


def saturating(far: Floats, speed: float, power: float) -> Floats:
    """1 - (1 + speed x)^-power: the shape of the shift."""
    return -np.expm1(-power * np.log1p(speed * far))


@dataclass(frozen=True)
class Law:
    """What the readings of some runs say about all others; make it with `fit_law`."""

    shapes: Shapes
    chosen: NDArray[np.int64]
    """[member] Which shape it has."""
    weights: Floats
    """[member] They sum to 1."""
    means: Floats
    """[member, term] The linear coefficients."""
    covariances: Floats
    """[member, term, term]"""
    noise: Floats
    """[member] Of a reading, as a share of its run's largest change."""
    wandering: Floats
    """[member] Over the noise."""

    def forecast(self, curve: Curve, draws: int = 20_000, seed: int = 0) -> list[Interval]:
        """The changes at the curve's steps, with what a run and a reading scatter by themselves.

        Args:
            curve: of a share of replay that was read; its steps are spread over the run, since the scatter goes with
                the largest change.
        """
        terms = self.shapes.terms(curve)[self.chosen]
        middles = np.einsum("mrt,mt->mr", terms, self.means)
        variances = np.einsum("mrt,mtu,mru->mr", terms, self.covariances, terms)
        sizes = np.maximum(np.abs(middles).max(axis=1), CALM * self.shapes.largest)[:, None]
        variances += (self.noise[:, None] * sizes) ** 2 * (
            1 + self.wandering[:, None] * curve.steps / self.shapes.most_steps
        )
        generator = np.random.default_rng(seed)
        members = generator.choice(len(self.weights), size=draws, p=self.weights)
        drawn = middles[members] + np.sqrt(variances[members]) * generator.standard_normal((draws, len(curve.steps)))
        low, middle, high = np.quantile(drawn, [(1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2], axis=0)
        return [Interval(float(m), float(a), float(b)) for m, a, b in zip(middle, low, high, strict=True)]

    def identified(self) -> dict[str, bool]:
        """Term -> whether the readings tell it from nothing."""
        middle = self.weights @ self.means
        squares = self.weights @ (self.means**2 + np.einsum("mtt->mt", self.covariances))
        clear = np.abs(middle) > 1.645 * np.sqrt(np.maximum(squares - middle**2, 0))
        names = [
            "annealing",
            "old trajectory",
            *(f"shift at {100 * share:g} % replay" for share in self.shapes.shares),
        ]
        return dict(zip(names, clear.tolist(), strict=True))


def fit_law(curves: Sequence[Curve]) -> Law:
    """Fit all shapes to the readings of all runs together, each with every amount of noise."""
    shapes = Shapes(curves)
    changes = np.concatenate([curve.changes for curve in curves])
    terms = np.concatenate([shapes.terms(curve) for curve in curves], axis=1)
    fits = []
    for own_way in WANDERING:
        root = np.linalg.cholesky(scatter(curves, own_way, shapes))
        whitening = np.linalg.inv(root)
        fit = Regression(whitening @ terms, whitening @ changes, (PRIOR * shapes.largest) ** 2)
        for noise in NOISE:
            evidence, means, covariances = fit.explain(noise**2)
            fits.append(
                (
                    evidence - np.log(np.diag(root)).sum(),
                    means,
                    covariances,
                    np.full(len(terms), noise),
                    np.full(len(terms), own_way),
                )
            )
    evidence, means, covariances, noises, wandering = (np.concatenate(part) for part in zip(*fits, strict=True))
    weights = np.exp(CREDENCE * (evidence - evidence.max()))
    (kept,) = np.nonzero(weights > TOO_UNLIKELY)
    total = weights[kept].sum()
    return Law(
        shapes, kept % len(terms), weights[kept] / total, means[kept], covariances[kept], noises[kept], wandering[kept]
    )


def scatter(curves: Sequence[Curve], wandering: float, shapes: Shapes) -> Floats:
    """[reading, reading] How readings scatter about the law together, for a noise of 1: each by itself, and each run
    on a random walk."""
    together = np.zeros((sum(len(curve.steps) for curve in curves),) * 2)
    first = 0
    for curve in curves:
        end, size = first + len(curve.steps), max(float(np.abs(curve.changes).max()), CALM * shapes.largest)
        walk = np.minimum.outer(curve.steps, curve.steps) / shapes.most_steps
        together[first:end, first:end] = (np.eye(end - first) + wandering * walk) * size**2
        first = end
    return together


class Regression:
    """Bayesian linear regression of many shapes on the same readings.

    Args:
        terms: [shape, reading, term], whitened, as the readings are.
        prior: variance of each coefficient before anything was read.
    """

    def __init__(self, terms: NDArray[Any], readings: NDArray[Any], prior: float) -> None:
        self.products = np.einsum("mrt,mru->mtu", terms, terms, optimize=True)
        self.answers = np.einsum("mrt,r->mt", terms, readings)
        self.square, self.number = float(readings @ readings), len(readings)
        self.prior = prior

    def explain(self, variance: float) -> tuple[Floats, Floats, Floats]:
        """Log evidence, means and covariances of the coefficients, for this variance of a reading."""
        number = self.answers.shape[1]
        precision = self.products / variance + np.eye(number) / self.prior
        covariances = np.linalg.inv(precision)
        means = np.einsum("mtu,mu->mt", covariances, self.answers) / variance
        fitted = 2 * (means * self.answers).sum(axis=1) - np.einsum(
            "mt,mtu,mu->m", means, self.products, means, optimize=True
        )
        evidence = -0.5 * ((self.square - fitted) / variance + (means**2).sum(axis=1) / self.prior)
        evidence -= 0.5 * (
            self.number * np.log(variance) + number * np.log(self.prior) + np.linalg.slogdet(precision)[1]
        )
        # Annealing only lowers the loss, and so does going on along the old trajectory: what speaks against either
        # weighs that much less.
        certain = means[:, :2] / np.sqrt(np.einsum("mtt->mt", covariances)[:, :2]) * [1, -1]
        evidence += torch.special.log_ndtr(torch.from_numpy(certain)).numpy().sum(axis=1)
        return evidence, means, covariances
