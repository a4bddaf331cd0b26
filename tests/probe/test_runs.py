import json

import numpy as np
import pytest

from cpt.errors import RecipeError, TrainingError
from cpt.evaluation.retention import Point
from cpt.probe.plan import ProbeRun, make_plan
from cpt.probe.runs import Outcome, carry_out, told_run
from cpt.recipe.load import dump_recipe, load_recipe


@pytest.fixture
def plan(tiny_recipe, corpus, tmp_path):
    from tiny import write_recipe

    sets = [{"path": str(corpus / "held_out.jsonl"), "name": name} for name in ("domain", "general")]
    tiny_recipe |= {
        "stage": "cpt",
        "model": {"path": "base"},
        "budget": {"tokens": 800 * 256, "global_batch_tokens": 256},
        "evaluation": {"retain": {"general": None}, "perplexity": sets},
    }
    return make_plan(
        load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml")),
        0,
        shares=[0.1],
        rates=[1e-3],
        probe_tokens=24 * 256,
    )


def write_run(plan, run, state="finished", **changes):
    """What `cpt train` leaves, with two evaluations."""
    recipe = plan.recipe_of(run)
    folder = recipe.output_dir / recipe.name
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe.model_copy(update=changes)))
    (folder / "status.json").write_text(json.dumps({"state": state}))
    lines = [
        {
            "step": step,
            "tokens": step * 256,
            "eval_domain_bits_per_byte": 2 - step / 100,
            "eval_general_bits_per_byte": 2 + step / 100,
        }
        for step in (0, 12, 24)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_finished_run_is_not_done_again(plan):
    write_run(plan, plan.grid[0])
    outcome = carry_out(plan, plan.grid[0])  # a training would fail: there is no base
    assert outcome.at_end(["domain"]) == pytest.approx(1.76) and [point.step for point in outcome.course] == [
        0,
        12,
        24,
    ]


def test_a_run_of_another_recipe_is_not_taken_for_this_one(plan):
    write_run(plan, plan.grid[0], seed=99)
    with pytest.raises(RecipeError, match="seed: 99 -> 42"):
        carry_out(plan, plan.grid[0])


def test_a_failed_run_ends_the_probe_with_its_last_words(plan):
    with pytest.raises(TrainingError, match="failed with exit code 3"):
        carry_out(plan, plan.grid[0], launcher="python -c 'raise SystemExit(3)'")


def test_a_curve_is_the_change_since_before_the_first_step(plan):
    course = [Point(step, step * 256, {"domain": 2 - step / 100, "other": 4.0}) for step in (0, 12, 24)]
    curve = Outcome(ProbeRun(0.1, 1e-3, 24), course).curve(plan, ["domain", "other"])
    np.testing.assert_allclose(curve.changes, [-0.06, -0.12])
    assert curve.steps.tolist() == [12, 24] and len(curve.rates) == 24 and curve.share == 0.1


def test_a_run_is_told_in_words():
    assert told_run(ProbeRun(0.1, 3e-4, 24)) == "replay 10 %, learning rate 0.0003"
