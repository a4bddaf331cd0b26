import pytest
from tiny import write_recipe
from tiny_search import SPACE, space_in

from cpt.errors import RecipeError
from cpt.search.library import optuna
from cpt.search.samplers import SAMPLERS, build_sampler
from cpt.search.space import load_space
from cpt.search.study import Study

COUNTED = {"schedule.floor": [0.0, 0.1], "optimizer.weight_decay": {"low": 0.0, "high": 0.2, "step": 0.1}}


def drawn(space, count):
    study = Study(space, optuna().create_study(), 1)
    found = []
    for _ in range(count):
        trial = study.ask()
        found.append(str(study.values_of(trial)))
        study.end(trial, "complete", float(len(found)), "")
    return found


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_seed_decides_the_draws_and_no_two_are_alike(tmp_path, name):
    found = []
    for seed in (1, 1, 2):
        space = write_recipe(
            {**COUNTED, "search": {"metric": "loss", "sampler": name, "seed": seed}}, tmp_path / "space.yaml"
        )
        found.append(drawn(load_space(space), 6))
    assert found[0] == found[1] != found[2]
    if name == "grid":
        assert len(set(found[0])) == 6, "each combination once"


def test_a_grid_needs_values_that_can_be_counted(tmp_path):
    with pytest.raises(
        RecipeError, match=r"space.yaml:\d+: `sampler: grid` needs .* give `optimizer.learning_rate` a `step`"
    ):
        build_sampler(space_in(tmp_path, sampler="grid"), 0)


@pytest.mark.parametrize(
    ("sampler", "told"),
    [
        ("tpee", "Did you mean `tpe`"),
        ({"name": "tpe", "startup": 3}, "`search.sampler.startup` is not an option of tpe"),
    ],
)
def test_a_sampler_that_is_not_there_is_refused(tmp_path, sampler, told):
    with pytest.raises(RecipeError, match=told):
        build_sampler(space_in(tmp_path, sampler=sampler), 0)


def test_few_trials_leave_some_for_the_estimator(tmp_path):
    assert SPACE["search"]["trials"] == 6
    assert build_sampler(space_in(tmp_path), 0)._n_startup_trials == 4
    assert build_sampler(space_in(tmp_path, sampler={"name": "tpe", "startup_trials": 0}), 0)._n_startup_trials == 0
