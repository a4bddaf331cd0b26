import json

import pytest

from benchmarks.rewarming.corpus import Shift, Text
from benchmarks.rewarming.training import (
    ARMS,
    JOINT,
    NO_REWARMING,
    RECIPES,
    REPLAY,
    REWARMING,
    Experiment,
    Scale,
    schedule,
)
from cpt.extend import find
from cpt.optim.schedules import SCHEDULES
from cpt.recipe.load import load_recipe

SHIFT = Shift("strong", "code", 0.25)
TOKENS, PEAK = 1000, 4e-3


def rates(arm, recipe):
    loaded = load_recipe(recipe, schedule(arm, TOKENS, PEAK))
    factor = find("schedule", loaded.schedule.name, SCHEDULES)
    return [
        loaded.optimizer.learning_rate * factor(at, TOKENS, **loaded.schedule.options) for at in (0, 50, 500, 1000)
    ]


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        (NO_REWARMING, [4e-4, 4e-4, 4e-4, 4e-4]),
        (REWARMING, [4e-4, 4e-3, 2.35e-3, 4e-4]),
        (REPLAY, [4e-4, 4e-3, 2.35e-3, 4e-4]),
        (JOINT, [0, 4e-3, 2.35e-3, 4e-4]),
    ],
)
def test_the_learning_rate_of_each_arm(arm, expected):
    recipe = RECIPES / "demo" / "pretrain.yaml" if arm == JOINT else RECIPES / "demo.yaml"
    assert rates(arm, recipe) == pytest.approx(expected, rel=0.05)


def test_each_arm_trains_as_the_paper_has_it(monkeypatch, tmp_path):
    recipes = {}

    def remember(recipe):
        recipes[recipe.name] = recipe
        folder = tmp_path / recipe.name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(
            json.dumps({"step": 1, "tokens": 9, "eval_general_bits_per_byte": 2.0}) + "\n"
        )
        return folder / "final"

    monkeypatch.setattr("benchmarks.rewarming.training.train", remember)
    texts = {
        kind: Text(tmp_path / kind / "train.jsonl", tmp_path / kind / "held_out.jsonl")
        for kind in ("general", "strong")
    }
    experiment = Experiment(texts, tmp_path / "tokenizer", Scale(base_tokens=6000, tokens=2000), tmp_path)
    experiment.run_base(3)
    results = {arm: experiment.run_arm(arm, SHIFT, 3) for arm in ARMS}
    base, alone, rewarmed, replayed, joint = recipes.values()
    assert {recipe.seed for recipe in recipes.values()} == {3}
    assert [source.name for source in base.data.sources] == ["general"] and base.model.from_scratch
    for recipe in (alone, rewarmed, replayed):
        assert recipe.model.path == str(tmp_path / base.name / "final") and recipe.budget.tokens == 2000
    assert [(source.name, source.weight) for source in rewarmed.data.sources] == [("strong", 1.0)]
    assert [(source.name, source.weight) for source in replayed.data.sources] == [("strong", 0.75), ("general", 0.25)]
    assert [(source.name, source.weight) for source in joint.data.sources] == [("general", 0.75), ("strong", 0.25)]
    assert joint.budget.tokens == 8000 == results[JOINT].tokens and joint.model.from_scratch
    assert [one.name for one in joint.evaluation.perplexity] == ["general", "strong"]
    assert results[REPLAY].bits_per_byte == {"general": 2.0}
