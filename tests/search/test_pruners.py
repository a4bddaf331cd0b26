import pytest
from tiny_search import space_in

from cpt.errors import RecipeError
from cpt.search.library import optuna
from cpt.search.pruners import build_pruner


def test_each_name_gives_optunas_with_its_lengths_in_tokens(tmp_path):
    pruners = optuna().pruners
    kinds = {
        "none": pruners.NopPruner,
        "median": pruners.PercentilePruner,
        "halving": pruners.SuccessiveHalvingPruner,
        "hyperband": pruners.HyperbandPruner,
    }
    for name, kind in kinds.items():
        assert isinstance(build_pruner(space_in(tmp_path, pruner=name).settings, 27_000), kind)
    halving = build_pruner(space_in(tmp_path, pruner="halving").settings, 27_000)
    assert halving._min_resource == 1000


@pytest.mark.parametrize(
    ("pruner", "tokens", "told"),
    [
        ("hyperband", None, "write the recipe's `budget.tokens`"),
        ("medain", 100, "Did you mean `median`"),
        ({"name": "median", "warmup": 3}, 100, "It takes: startup_trials, warmup_tokens"),
        ({"name": "percentile"}, 100, "`search.pruner` needs `keep`"),
        ({"name": "percentile", "keep": 100}, 100, "above 0 and below 100"),
    ],
)
def test_a_pruner_that_cannot_be_is_refused(tmp_path, pruner, tokens, told):
    with pytest.raises(RecipeError, match=told):
        build_pruner(space_in(tmp_path, pruner=pruner).settings, tokens)


def test_your_own_comes_through_the_door(tmp_path, monkeypatch):
    (tmp_path / "my_pruner.py").write_text(
        "import optuna\ndef never(total_tokens, *, often=1):\n    return optuna.pruners.NopPruner()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    settings = space_in(tmp_path, pruner={"name": "my_pruner:never", "often": 2}).settings
    assert isinstance(build_pruner(settings, 100), optuna().pruners.NopPruner)
