"""What a probe found: each combination measured and forecast, whether the forecast held, and what to do."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cpt.evaluation.retention import average
from cpt.probe.law import Curve, Interval, Law, fit_law
from cpt.probe.plan import READINGS, Plan, ProbeRun
from cpt.probe.runs import Outcome


@dataclass(frozen=True)
class Combination:
    """A share of replay and a learning rate."""

    share: float
    rate: float
    domain: float
    """Bits per byte after the short run."""
    general: float
    forecast_domain: Interval
    """Bits per byte after the whole run."""
    forecast_general: Interval


@dataclass(frozen=True)
class Check:
    """A forecast against what the run that was held back measured."""

    kind: str
    """domain or general."""
    tokens: int
    share: float
    rate: float
    forecast: Interval
    measured: float

    @property
    def held(self) -> bool:
        """The interval holds the measured value."""
        return self.forecast.holds(self.measured)

    def sentence(self) -> str:
        """`forecast 2.145 (2.120 to 2.170), held-back run measured 2.151: inside`."""
        told = f"{self.forecast.middle:.3f} ({self.forecast.low:.3f} to {self.forecast.high:.3f})"
        return (
            f"{self.kind}: forecast {told}, held-back run measured {self.measured:.3f}:"
            f" {'inside' if self.held else 'OUTSIDE'}"
        )


@dataclass(frozen=True)
class Report:
    """All of it."""

    name: str
    tokens: int
    """Of the whole run."""
    probe_tokens: int
    """Of all short runs together."""
    domain_sets: list[str]
    general_sets: list[str]
    base_domain: float
    base_general: float
    limit: float | None
    """Bits per byte that general text may come to, from `evaluation.retain`."""
    combinations: list[Combination]
    checks: list[Check]
    recommended: Combination | None
    why: str
    overrides: list[str]
    remarks: list[str]

    @property
    def is_worth_it(self) -> bool:
        """Some combination is forecast to gain, within the limit."""
        return self.recommended is not None

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        content = asdict(self)
        content["is_worth_it"] = self.is_worth_it
        for entry, check in zip(content["checks"], self.checks, strict=True):
            entry["held"], entry["sentence"] = check.held, check.sentence()
        return content


@dataclass(frozen=True)
class Laws:
    """The law of domain and of general text, fitted to the same runs."""

    plan: Plan
    domain: Law
    general: Law
    base_domain: float
    base_general: float

    def at_end(self, share: float, rate: float, steps: int | None = None) -> tuple[Interval, Interval]:
        """Bits per byte after a run of so many steps, by default the whole run."""
        rates = self.plan.rates_of_steps(rate, steps)
        points = np.unique(np.linspace(1, len(rates), READINGS + 1).round().astype(int)[1:])
        curve = Curve(share, rates, points, np.empty(0))
        pairs = ((self.domain, self.base_domain), (self.general, self.base_general))
        domain, general = (shifted(law.forecast(curve)[-1], base) for law, base in pairs)
        return domain, general


def shifted(change: Interval, base: float) -> Interval:
    """From a change to what it comes to."""
    return Interval(base + change.middle, base + change.low, base + change.high, change.level)


def fit_laws(plan: Plan, outcomes: Sequence[Outcome]) -> Laws:
    """Fit both laws to the runs."""
    before = outcomes[0].course[0]
    domain, general = (
        fit_law([outcome.curve(plan, sets) for outcome in outcomes]) for sets in (plan.domain, plan.general)
    )
    return Laws(plan, domain, general, average(before, plan.domain), average(before, plan.general))


def combinations_of(plan: Plan, laws: Laws, outcomes: Sequence[Outcome]) -> list[Combination]:
    """Each run of the grid with its forecast."""
    return [
        Combination(
            outcome.run.share,
            outcome.run.rate,
            outcome.at_end(plan.domain),
            outcome.at_end(plan.general),
            *laws.at_end(outcome.run.share, outcome.run.rate),
        )
        for outcome in outcomes
    ]


def limit_of(plan: Plan, base_general: float) -> float | None:
    """What general bits per byte, the average of the sets, may come to: `evaluation.retain`, of several sets the
    strictest."""
    rises = [rise for rise in plan.recipe.evaluation.retain.values() if rise is not None]
    return base_general * (1 + min(rises)) if rises else None


def choose(
    combinations: Sequence[Combination], base_domain: float, limit: float | None
) -> tuple[Combination | None, str]:
    """The combination to take, and why; None where continued pre-training is not worth it."""
    gaining = [one for one in combinations if one.forecast_domain.high < base_domain]
    if not gaining:
        best = min(combinations, key=lambda one: one.forecast_domain.middle)
        return (
            None,
            (
                "CPT is not worth it here: no combination is forecast to gain on domain text beyond what is"
                f" uncertain. The best comes from {base_domain:.4f} to {told(best.forecast_domain)} bits per byte, so"
                " the base may be as good already."
            ),
        )
    if limit is None:
        return (
            knee(gaining),
            "no limit is set in `evaluation.retain`, so this is the knee: nearest to the best of both kinds of text",
        )
    allowed = [one for one in gaining if one.forecast_general.middle <= limit]
    if not allowed:
        mildest = min(combinations, key=lambda one: one.forecast_general.middle)
        return (
            None,
            (
                f"CPT is not worth it here under `evaluation.retain`: general text may come to {limit:.4f} bits per"
                " byte, and every combination that gains is forecast to exceed that; the mildest of all comes to"
                f" {told(mildest.forecast_general)}. Try more replay or a lower learning rate, `lora: cpt`, or allow"
                " more."
            ),
        )
    best = min(allowed, key=lambda one: one.forecast_domain.middle)
    sure = "with its whole interval" if best.forecast_general.high <= limit else "though its interval goes beyond"
    return (
        best,
        (
            f"the best on domain text of those whose general text is forecast to stay within the limit of {limit:.4f},"
            f" {sure}"
        ),
    )


def knee(combinations: Sequence[Combination]) -> Combination:
    """The one nearest to the best of both, each in units of its spread over the combinations."""
    points = np.array([[one.forecast_domain.middle, one.forecast_general.middle] for one in combinations])
    spread = np.maximum(points.max(axis=0) - points.min(axis=0), 1e-12)
    return combinations[int(np.argmin((((points - points.min(axis=0)) / spread) ** 2).sum(axis=1)))]


def told(forecast: Interval) -> str:
    """`2.145 (2.120 to 2.170)`."""
    return f"{forecast.middle:.3f} ({forecast.low:.3f} to {forecast.high:.3f})"


def judge(plan: Plan, outcomes: Sequence[Outcome], held_back: Outcome, before_it: Laws) -> Report:
    """Put the report together.

    Args:
        outcomes: of the grid.
        before_it: the laws without the run that was held back; what is forecast in the end rests on all runs.
    """
    run = held_back.run
    laws = fit_laws(plan, [*outcomes, held_back])
    combinations = combinations_of(plan, laws, outcomes)
    limit = limit_of(plan, laws.base_general)
    recommended, why = choose(combinations, laws.base_domain, limit)
    checks = checks_of(plan, before_it, held_back)
    return Report(
        name=plan.recipe.name,
        tokens=plan.length.tokens,
        probe_tokens=plan.tokens,
        domain_sets=plan.domain,
        general_sets=plan.general,
        base_domain=laws.base_domain,
        base_general=laws.base_general,
        limit=limit,
        combinations=combinations,
        checks=checks,
        recommended=recommended,
        why=why,
        overrides=plan.overrides(recommended.share, recommended.rate) if recommended else [],
        remarks=remarks_of(plan, laws, run, recommended, checks),
    )


def checks_of(plan: Plan, laws: Laws, held_back: Outcome) -> list[Check]:
    """What was forecast of the run, and what it measured."""
    run = held_back.run
    forecasts = zip(
        ("domain", "general"), laws.at_end(run.share, run.rate, run.steps), (plan.domain, plan.general), strict=True
    )
    tokens = run.steps * plan.length.tokens_per_step
    return [
        Check(kind, tokens, run.share, run.rate, forecast, held_back.at_end(sets))
        for kind, forecast, sets in forecasts
    ]


def remarks_of(
    plan: Plan, laws: Laws, held_back: ProbeRun, recommended: Combination | None, checks: Sequence[Check]
) -> list[str]:
    """What a reader should know before relying on it."""
    remarks = []
    for kind, law in (("domain", laws.domain), ("general", laws.general)):
        unclear = [term for term, is_clear in law.identified().items() if not is_clear]
        if unclear:
            remarks.append(
                f"The law of {kind} text: {', '.join(unclear)} cannot be told from nothing by these runs; the"
                " intervals know it."
            )
    if any(not check.held for check in checks):
        remarks.append(
            "A forecast did not hold for the run that was held back. The forecasts of the whole run rest on that run"
            " too, but do not lean on them: longer short runs (--probe-tokens) are nearer to the whole one."
        )
    reach = laws.plan.rates_of_steps(plan.rates[-1]).sum() / laws.domain.shapes.longest[1.0]
    if reach > 10:
        remarks.append(
            f"The whole run goes {reach:.0f} times as far (sum of learning rates) as the longest short one: far to"
            " forecast."
        )
    if recommended is not None and len(plan.rates) > 1 and recommended.rate in (plan.rates[0], plan.rates[-1]):
        side = "highest" if recommended.rate == plan.rates[-1] else "lowest"
        remarks.append(
            f"The recommended learning rate is the {side} that was tried; a probe with others may find a better one"
            " (--rates)."
        )
    if recommended is not None and (recommended.share, recommended.rate) != (held_back.share, held_back.rate):
        remarks.append(
            "With the run that was held back in the fit, another combination came first than the one that was held"
            " back."
        )
    return remarks
