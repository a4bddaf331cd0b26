import json

import numpy as np
import pytest
from tiny import write_recipe

from cpt.evaluation.retention import Point
from cpt.probe.law import Interval, saturating
from cpt.probe.plan import ProbeRun, make_plan
from cpt.probe.report import Check, Combination, checks_of, choose, fit_laws, judge, knee, limit_of
from cpt.probe.runs import Outcome
from cpt.recipe.load import load_recipe


@pytest.fixture
def plan(tiny_recipe, corpus, tmp_path):
    """Two shares and two rates, short runs of 40 steps, a whole run of 400."""
    sets = [{"path": str(corpus / "held_out.jsonl"), "name": name} for name in ("domain", "general")]
    tiny_recipe |= {
        "stage": "cpt",
        "model": {"path": "base"},
        "budget": {"tokens": 400 * 256, "global_batch_tokens": 256},
        "evaluation": {"retain": {"general": 0.05}, "every_steps": 100, "perplexity": sets},
    }
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    return make_plan(recipe, 0, shares=[0.1, 0.3], rates=[1e-3, 3e-3], probe_tokens=40 * 256)


def outcome_of(plan, run, *, gain=0.4, loss=0.2):
    """As the law would have it, with a little noise."""
    rates = plan.rates_of_steps(run.rate, run.steps)
    far = np.cumsum(rates) / 0.06
    draw = np.random.default_rng(round(1e6 * (run.share + run.rate)))
    course = [Point(0, 0, {"domain": 2.5, "general": 2.2})]
    for step in range(run.steps // 8, run.steps + 1, run.steps // 8):
        domain = 2.5 - gain * (1 - run.share) * saturating(far[step - 1 : step], 5.0, 0.4)[0]
        general = 2.2 + loss * (0.4 - run.share) * saturating(far[step - 1 : step], 5.0, 1.0)[0]
        noise = 0.001 * draw.standard_normal(2)
        course.append(
            Point(step, step * 256, {"domain": float(domain + noise[0]), "general": float(general + noise[1])})
        )
    return Outcome(run, course)


def combination(share, domain, general, spread=0.01):
    domain, general = (Interval(value, value - spread, value + spread) for value in (domain, general))
    return Combination(share, 1e-3, 2.4, 2.3, domain, general)


def report_of(plan, **truth):
    outcomes = [outcome_of(plan, run, **truth) for run in plan.grid]
    held_back = outcome_of(plan, plan.held_back(0.3, 3e-3), **truth)
    return judge(plan, outcomes, held_back, fit_laws(plan, outcomes))


@pytest.mark.slow
def test_the_run_that_was_held_back_lies_inside_what_was_forecast(plan):
    report = report_of(plan)
    assert [check.kind for check in report.checks] == ["domain", "general"] and all(
        check.held for check in report.checks
    )
    whole = outcome_of(plan, ProbeRun(0.3, 3e-3, 400))
    forecast = next(one for one in report.combinations if (one.share, one.rate) == (0.3, 3e-3))
    assert forecast.forecast_domain.holds(whole.at_end(["domain"])) and forecast.forecast_general.holds(
        whole.at_end(["general"])
    )
    assert report.is_worth_it and report.overrides[-1].startswith("optimizer.learning_rate=")
    assert json.loads(json.dumps(report.to_json()))["checks"][0]["held"] is True


@pytest.mark.slow
def test_a_run_that_does_otherwise_is_outside_and_said_so(plan):
    outcomes = [outcome_of(plan, run) for run in plan.grid]
    strange = outcome_of(plan, plan.held_back(0.3, 3e-3), gain=0.9)
    laws = fit_laws(plan, outcomes)
    assert not checks_of(plan, laws, strange)[0].held
    assert any("A forecast did not hold" in remark for remark in judge(plan, outcomes, strange, laws).remarks)


def test_no_gain_is_said_plainly(plan):
    report = report_of(plan, gain=0.0)
    assert not report.is_worth_it and report.why.startswith(
        "CPT is not worth it here: no combination is forecast to gain"
    )


def test_a_limit_that_all_exceed_is_said_plainly():
    best, why = choose([combination(0.0, 2.0, 2.4), combination(0.3, 2.1, 2.3)], base_domain=2.5, limit=2.25)
    assert best is None and "under `evaluation.retain`" in why and "2.300" in why


def test_under_a_limit_the_best_that_keeps_it_is_taken():
    over, kept, milder = (
        combination(0.0, 2.0, 2.4),
        combination(0.1, 2.1, 2.24, spread=0.02),
        combination(0.3, 2.2, 2.21),
    )
    best, why = choose([over, kept, milder], base_domain=2.5, limit=2.25)
    assert best == kept and why.endswith("though its interval goes beyond")


def test_without_a_limit_the_knee_is_taken():
    ends = combination(0.0, 2.0, 2.4), combination(0.5, 2.4, 2.2)
    middle = combination(0.2, 2.08, 2.24)
    assert knee([ends[0], middle, ends[1]]) == middle
    assert choose([*ends, middle], base_domain=2.5, limit=None)[0] == middle


def test_the_limit_follows_from_the_base(plan):
    assert limit_of(plan, 2.0) == pytest.approx(2.1)


def test_a_check_says_what_was_forecast_and_measured():
    check = Check("domain", 1, 0.1, 1e-3, Interval(2.145, 2.12, 2.17), 2.151)
    assert check.sentence() == "domain: forecast 2.145 (2.120 to 2.170), held-back run measured 2.151: inside"
