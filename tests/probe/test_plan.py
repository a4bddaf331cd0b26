import numpy as np
import pytest
from tiny import write_recipe

from cpt.errors import DataError, RecipeError
from cpt.probe.plan import Plan, ProbeRun, check_held_out, make_plan
from cpt.recipe.load import load_recipe


@pytest.fixture
def probed(tiny_recipe, corpus, tmp_path):
    """A recipe with a domain, a general set, and 800 steps of 256 tokens."""
    tiny_recipe |= {
        "stage": "cpt",
        "model": {"path": "base"},
        "budget": {"tokens": 800 * 256, "global_batch_tokens": 256},
        "optimizer": {"name": "adamw", "learning_rate": 3e-3},
        "schedule": {"name": "cosine", "warmup_tokens": 80 * 256},
        "evaluation": {
            "retain": {"general": 0.02},
            "every_steps": 100,
            "perplexity": [held_out(corpus, "domain"), held_out(corpus, "general")],
        },
    }
    return lambda *overrides: load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"), overrides)


WITHOUT_WEIGHTS = "data.sources=[{path: a.jsonl, name: domain}, {path: b.jsonl, name: general}]"


def held_out(corpus, name):
    return {"path": str(corpus / "held_out.jsonl"), "name": name}


def plan_of(recipe, **options) -> Plan:
    return make_plan(recipe, tokens_of_sources=10_000, **options)


def test_by_default_all_runs_take_a_fifth_of_the_budget(probed):
    plan = plan_of(probed("budget.tokens=1_024_000"))
    assert [run.share for run in plan.grid] == [0.0, 0.0, 0.1, 0.1, 0.3, 0.3] and plan.rates == [0.001, 0.003]
    assert 0.15 < plan.cost <= 0.2 and plan.steps % 8 == 0


def test_a_share_scales_the_weights_and_keeps_the_rest(probed):
    plan = plan_of(probed(), shares=[0.1], rates=[1e-3])
    assert plan.weights(0.1) == {0: 0.9, 1: 0.1}
    assert plan.overrides(0.1, 1e-3) == [
        "data.sources.0.weight=0.9",
        "data.sources.1.weight=0.1",
        "optimizer.learning_rate=0.001",
    ]


def test_the_overrides_give_the_recipe_that_was_forecast(probed):
    plan = plan_of(probed(), shares=[0.0], rates=[2e-3])
    recipe = probed(*plan.overrides(0.0, 2e-3))
    assert [source.weight for source in recipe.data.sources] == [1.0, 1e-9] and recipe.optimizer.learning_rate == 2e-3


def test_a_short_run_has_the_same_curve_shorter(probed):
    plan = plan_of(probed(), shares=[0.1], rates=[3e-3], probe_tokens=80 * 256)
    recipe = plan.recipe_of(plan.grid[0])
    assert recipe.budget.tokens == 80 * 256 and recipe.schedule.options["warmup_tokens"] == 8 * 256
    whole, short = plan.rates_of_steps(3e-3), plan.rates_of_steps(3e-3, 80)
    np.testing.assert_allclose(short, whole[9::10], rtol=1e-6)


def test_a_short_run_never_stops_early_and_is_read_eight_times(probed):
    recipe = plan_of(probed("evaluation.every_steps=5"), shares=[0.1], rates=[1e-3], probe_tokens=80 * 256).recipe_of(
        ProbeRun(0.1, 1e-3, 80)
    )
    assert (
        recipe.evaluation.retain == {"general": None}
        and recipe.evaluation.every_steps == 10
        and recipe.evaluation.prompts == []
    )
    assert [task.options for task in recipe.evaluation.tasks] == [{"questions": 0}]  # no domain test either


def test_a_budget_in_epochs_counts_the_sources(probed):
    plan = plan_of(probed("budget.tokens=null", "budget.epochs=30"), shares=[0.1], rates=[1e-3])
    assert plan.length.tokens == 300_032


@pytest.mark.parametrize(
    ("overrides", "options", "told"),
    [
        (["stage=pretrain"], {}, "takes recipes with `stage: cpt`"),
        (["evaluation.retain={}"], {}, "HuggingFaceFW/fineweb-edu"),
        (["evaluation={}"], {}, "holds no documents out"),
        ([WITHOUT_WEIGHTS, "data.temperature=2"], {}, "`data.temperature=null`"),
        ([], {"shares": [1.0]}, "--shares takes shares of the tokens, from 0 to less than 1; not 1."),
        ([], {"shares": [-0.1]}, "not -0.1"),
        ([], {"rates": [0.0]}, "--rates takes peak learning rates"),
        ([], {"replay": ["genral"]}, "Did you mean"),
        ([], {"replay": ["domain", "general"]}, "none is left to learn from"),
        (["data.sources.1.name=other"], {}, "--replay other"),
        (["budget.tokens=20_000"], {}, "--probe-tokens 6144"),
        ([], {"probe_tokens": 256}, "Give more"),
        ([], {"probe_tokens": 600 * 256}, "Give at most 102,400"),
    ],
)
def test_what_cannot_be_probed_is_refused_with_the_remedy(probed, overrides, options, told):
    with pytest.raises(RecipeError, match=".") as refused:
        plan_of(probed(*overrides), **options)
    assert told in str(refused.value)


def test_rates_alone_need_no_replay(probed):
    plan = plan_of(probed("data.sources.1.name=other"), shares=[0.0], rates=[1e-3, 2e-3])
    assert plan.overrides(0.0, 1e-3) == ["optimizer.learning_rate=0.001"]


def test_too_few_held_out_documents_are_refused(probed):
    plan = plan_of(probed(), shares=[0.1], rates=[1e-3])
    with pytest.raises(DataError, match=r"general \(1\).*held_out_share.*fineweb-edu"):
        check_held_out({"domain": 12, "general": 1}, plan)
