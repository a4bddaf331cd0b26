import json

import pytest
from rich.console import Console
from tiny_search import Curve, recipe_in, space_in, study_in_memory

from cpt.recipe.load import load_recipe
from cpt.search.record import claim
from cpt.search.results import (
    best_of,
    importance_of,
    options_of_train,
    remove_weights,
    results_of,
    show_results,
    table_of,
    write_results,
)
from cpt.search.search import Search
from cpt.search.trial import Ending


@pytest.fixture
def searched(tiny_recipe, tmp_path, monkeypatch):
    """Six complete trials and one that failed."""
    monkeypatch.setattr("cpt.search.search.SECONDS_BETWEEN_LOOKS", 0.0)
    _, recipe, root = recipe_in(tmp_path, tiny_recipe)
    record = claim(recipe, root, space_in(tmp_path, pruner="none", trials=7, sampler="random"))
    study = study_in_memory(record.space)

    class Failing(Curve):
        def look(self):
            return ([(10, 5.0)], None) if self.looks else ([], Ending("failed", reason="DataError: no rows\nmore"))

    Search(study, lambda draw: Failing(draw) if draw.number == 2 else Curve(draw)).run()
    yield record, study
    record.lock.close()


def test_the_table_begins_with_the_best_and_says_why_others_failed(searched):
    record, study = searched
    console = Console(width=140)
    with console.capture() as shown:
        console.print(table_of(record.space, results_of(study)))
    lines = [line for line in shown.get().splitlines() if "trial-" in line]
    values = [float(line.split("│")[3]) for line in lines[:-1]]
    assert values == sorted(values) and "failed" in lines[-1] and "DataError: no rows" in lines[-1] and len(lines) == 7


def test_the_best_recipe_is_a_file_that_says_where_it_is_from(searched, capsys):
    record, study = searched
    best = best_of(record.space.settings, results_of(study))
    show_results(record, results_of(study), importance_of(study))
    said, path = capsys.readouterr().out, record.folder / "best.yaml"
    assert f"cpt train {path}" in said.replace("\n", "") and "What mattered: " in said
    text, recipe = path.read_text(), load_recipe(path)
    assert f"trial-{best.number:03d}" in text and f"loss {best.value:.6g}" in text and "7 trials" in text
    assert recipe.optimizer.learning_rate == pytest.approx(best.values["optimizer.learning_rate"], rel=1e-5)
    assert recipe.name == "tiny-search-best" and recipe.output_dir == record.recipe.output_dir
    results = json.loads((record.folder / "results.json").read_text())
    assert results["best"] == best.number and [one["state"] for one in results["trials"]].count("complete") == 6


def test_the_command_starts_the_best_as_the_trials_were():
    assert options_of_train(1, None) == [] and options_of_train(4, None) == ["--supervise", "--processes", "4"]
    assert options_of_train(4, "accelerate launch") == ["--supervise", "--launcher", "accelerate launch"]


def test_more_may_be_better(searched):
    record, study = searched
    results = results_of(study)
    most = record.space.settings.model_copy(update={"direction": "maximize"})
    assert best_of(most, results).value == max(one.value for one in results if one.state == "complete")


def test_what_mattered_adds_up_to_one_and_is_silent_where_it_would_be_chance(searched):
    _, study = searched
    importance = importance_of(study)
    assert sum(importance.values()) == pytest.approx(1) and next(iter(importance)) == "optimizer.learning_rate"
    assert importance_of(study_in_memory(study.space)) == {}


def test_no_best_recipe_without_a_complete_trial(searched):
    record, study = searched
    assert write_results(record, [one for one in results_of(study) if one.state == "failed"], {}) is None


def test_only_the_best_ones_weights_stay_where_that_is_asked_for(searched):
    record, study = searched
    results = results_of(study)
    for one in results:
        for part in ("checkpoint-4", "final"):
            (record.run_of(one.number).folder / part).mkdir(parents=True)
        (record.run_of(one.number).folder / "metrics.jsonl").touch()
    remove_weights(record, results)
    kept = [folder.parent.name for folder in record.folder.glob("trial-*/final")]
    assert kept == [f"trial-{best_of(record.space.settings, results).number:03d}"]
    assert len(list(record.folder.glob("trial-*/metrics.jsonl"))) == 7
