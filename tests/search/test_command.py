"""The command: its mistakes are told before anything starts, and a search that is killed goes on."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter

import pytest
from tiny import write_recipe
from tiny_search import SPACE, recipe_in

from cpt.errors import LaunchError, RecipeError
from cpt.recipe.load import load_recipe
from cpt.runs.record import Run
from cpt.search.command import command
from cpt.train import train


def test_either_a_space_or_learning_rates(tiny_recipe, tmp_path):
    path, *_ = recipe_in(tmp_path, tiny_recipe)
    with pytest.raises(RecipeError, match="give either --space"):
        command(path)
    with pytest.raises(RecipeError, match="give either --space"):
        command(path, space=tmp_path / "s.yaml", learning_rates=(1e-6, 1e-2))


def test_a_search_is_not_started_by_a_launcher(tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(LaunchError, match="starts its trials' processes itself"):
        command(recipe_in(tmp_path, tiny_recipe)[0], space=tmp_path / "s.yaml")


def test_a_value_that_no_run_could_have_starts_nothing(tiny_recipe, tmp_path):
    path, *_ = recipe_in(tmp_path, tiny_recipe)
    space = write_recipe({**SPACE, "data.packing": ["best_fit", "best_fitt"]}, tmp_path / "space.yaml")
    with pytest.raises(RecipeError, match=r"space.yaml:\d+: with data.packing = best_fitt.*Did you mean `best_fit`"):
        command(path, space=space)
    assert not (tmp_path / "runs").exists()


def test_the_command_imports_no_torch():
    code = "import sys; import cpt.search.command; assert not {'torch', 'transformers', 'ray'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def start(path, space, *words):
    words = [sys.executable, "-m", "cpt.cli", "search", str(path), "--space", str(space), *words]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def states(folder):
    """How many trials of the study are in each state, read past Optuna."""
    try:
        with sqlite3.connect(f"file:{folder / 'study.db'}?mode=ro", uri=True) as study:
            return Counter(state for (state,) in study.execute("select state from trials"))
    except sqlite3.OperationalError:
        return Counter()


@pytest.mark.long
def test_a_search_of_8_trials_that_is_killed_goes_on_and_its_best_recipe_runs(tiny_recipe, tmp_path):
    path, *_ = recipe_in(tmp_path, tiny_recipe, checkpoints={"every_steps": 2})
    space = write_recipe(
        {**SPACE, "search": {**SPACE["search"], "trials": 8, "pruner": "none"}}, tmp_path / "space.yaml"
    )
    folder, words = tmp_path / "runs" / "tiny-search", ("--parallel", "4")
    first = start(path, space, *words)
    while states(folder)["COMPLETE"] < 2:
        assert first.poll() is None, first.stdout.read()
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    running = [trial for trial in sorted(folder.glob("trial-*")) if Run(trial).status().get("state") == "running"]
    for trial in running[:1]:  # one child dies with the search, others train on without it
        os.kill(Run(trial).status()["pid"], signal.SIGKILL)
    before = {trial: Run(trial).status()["updated"] for trial in folder.glob("trial-*") if Run(trial).is_finished}
    second = start(path, space, *words)
    said, _ = second.communicate()
    assert second.returncode == 0, said
    assert states(folder) == {"COMPLETE": 8} and len(before) >= 2
    assert all(Run(trial).status()["updated"] == updated for trial, updated in before.items()), (
        "finished ones are not done again"
    )
    steps = {
        trial.name: [json.loads(line)["step"] for line in (trial / "metrics.jsonl").open()]
        for trial in folder.glob("trial-*")
    }
    assert len(steps) == 8 and all(Counter(of_trial)[step] <= 2 for of_trial in steps.values() for step in range(8)), (
        "no two in one run"
    )
    results = json.loads((folder / "results.json").read_text())
    best = min(results["trials"], key=lambda trial: trial["value"])
    recipe = load_recipe(folder / "best.yaml")
    assert recipe.optimizer.learning_rate == pytest.approx(best["values"]["optimizer.learning_rate"], rel=1e-5)
    assert f"cpt train {folder / 'best.yaml'}" in said and best["run"] in (folder / "best.yaml").read_text()
    final = train(recipe)
    again = json.loads((final.parent / "metrics.jsonl").read_text().splitlines()[7])
    assert again["loss"] == pytest.approx(best["value"]), "the best recipe is the best trial"
