import json
import subprocess
import sys

import pytest
from tiny_search import recipe_in, space_in

from cpt.errors import CheckpointError, LaunchError, RecipeError
from cpt.recipe.load import load_recipe
from cpt.search.record import claim, is_known


def test_the_same_search_goes_on_and_another_one_is_refused_with_what_differs(tiny_recipe, tmp_path):
    _, recipe, root = recipe_in(tmp_path, tiny_recipe)
    assert not is_known(recipe, space_in(tmp_path))
    first = claim(recipe, root, space_in(tmp_path))
    first.lock.close()
    more = claim(recipe, root, space_in(tmp_path, trials=60, pruner="none", keep="best"))
    more.lock.close()
    assert more.folder == first.folder == tmp_path / "runs" / "tiny-search" and is_known(recipe, space_in(tmp_path))
    _, other, other_root = recipe_in(tmp_path, tiny_recipe, seed=7)
    with pytest.raises(RecipeError) as problem:
        claim(other, other_root, space_in(tmp_path, metric="grad_norm", sampler="random"))
    said = str(problem.value)
    assert (
        "recipe: seed: 42 -> 7" in said
        and "search.metric: loss -> grad_norm" in said
        and "search.sampler: {name: tpe}" in said
    )


def test_a_changed_space_is_refused_with_what_differs(tiny_recipe, tmp_path):
    _, recipe, root = recipe_in(tmp_path, tiny_recipe)
    claim(recipe, root, space_in(tmp_path)).lock.close()
    record = tmp_path / "runs" / "tiny-search" / "search.json"
    content = json.loads(record.read_text())
    content["space"]["optimizer.learning_rate"]["low"] = 1e-7
    content["space"]["seed"] = ["1", "2"]
    record.write_text(json.dumps(content))
    with pytest.raises(RecipeError) as problem:
        claim(recipe, root, space_in(tmp_path))
    assert "space: optimizer.learning_rate.low: 1e-7 -> 1e-5" in str(
        problem.value
    ) and "space: seed: [1, 2] -> " in str(problem.value)
    assert claim(recipe, root, space_in(tmp_path), new=True).folder.name == "tiny-search-2"


@pytest.mark.parametrize("content", ["", "[]", '{"settings": 3}', "{"])
def test_a_record_that_cannot_be_read_is_told(tiny_recipe, tmp_path, content):
    _, recipe, root = recipe_in(tmp_path, tiny_recipe)
    claim(recipe, root, space_in(tmp_path)).lock.close()
    (tmp_path / "runs" / "tiny-search" / "search.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"search.json cannot be read.*--new"):
        claim(recipe, root, space_in(tmp_path))


def test_a_folder_of_something_else_is_left_alone(tiny_recipe, tmp_path):
    _, recipe, root = recipe_in(tmp_path, tiny_recipe)
    (tmp_path / "runs" / "tiny-search").mkdir(parents=True)
    (tmp_path / "runs" / "tiny-search" / "diary.txt").touch()
    with pytest.raises(RecipeError, match="holds no search"):
        claim(recipe, root, space_in(tmp_path))


def test_two_processes_do_not_search_in_one_folder(tiny_recipe, tmp_path):
    _, recipe, root = recipe_in(tmp_path, tiny_recipe)
    claim(recipe, root, space_in(tmp_path)).lock.close()
    hold = (
        "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True);"
        " input()"
    )
    words = [sys.executable, "-c", hold, str(tmp_path / "runs" / "tiny-search" / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(LaunchError, match="another process searches in"):
            claim(recipe, root, space_in(tmp_path))
        other.communicate("\n")


def test_a_trials_recipe_is_a_run_of_its_own_in_the_searchs_folder(tiny_recipe, corpus, tmp_path):
    held_out = {
        "perplexity": [{"path": str(corpus / "held_out.jsonl"), "name": "papers"}],
        "tasks": [{"name": "hellaswag"}],
    }
    _, recipe, root = recipe_in(tmp_path, tiny_recipe, tags=["mine"], evaluation=held_out)
    record = claim(recipe, root, space_in(tmp_path))
    trial = load_recipe(record.write_trial(3, {"optimizer.learning_rate": 0.02, "schedule.floor": 0.2}))
    assert trial.output_dir / trial.name == record.folder / "trial-003" == record.run_of(3).folder
    assert trial.optimizer.learning_rate == 0.02 and trial.schedule.options == {"floor": 0.2}
    assert trial.description == "A trial of tiny-search."
    assert trial.tags == ["mine", "trial", "tiny-search"]
    assert [(task.name, task.options) for task in trial.evaluation.tasks] == [("domain_test", {"questions": 0})], (
        "left to the best recipe's run"
    )
    record.lock.close()


def test_values_that_do_not_fit_together_are_the_trials_failure(tiny_recipe, tmp_path):
    _, recipe, root = recipe_in(tmp_path, tiny_recipe)
    record = claim(recipe, root, space_in(tmp_path))
    with pytest.raises(RecipeError):
        record.write_trial(0, {"budget.epochs": 1})
    record.lock.close()
