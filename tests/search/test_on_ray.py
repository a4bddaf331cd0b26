import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tiny import write_recipe
from tiny_search import SPACE, recipe_in, space_in

from cpt.errors import RecipeError, ResourceError, TrainingError
from cpt.search.on_ray import EXPERIMENT, FOLDER, Watched, draw_all, imported, results_of_runs, scheduler_of
from cpt.search.record import claim
from cpt.search.trial import Ending

pytest.importorskip("ray")


def test_without_ray_the_install_line_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ResourceError, match=r"pip install 'cpt\[search,ray\]'"):
        imported()


def test_ray_tells_nobody_that_it_is_used(monkeypatch):
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    imported()
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_pruners_are_rays_own_in_tokens(tmp_path):
    kinds = {"none": "FIFOScheduler", "median": "MedianStoppingRule", "halving": "AsyncHyperBandScheduler"}
    for name, kind in kinds.items():
        assert type(scheduler_of(space_in(tmp_path, pruner=name).settings, 27_000)).__name__ == kind
    for pruner in ({"name": "percentile", "keep": 30}, {"name": "median", "often": 3}, "medain"):
        with pytest.raises(RecipeError, match="is not for --ray. It has: none; median"):
            scheduler_of(space_in(tmp_path, pruner=pruner).settings, 27_000)


class FromList:
    """A run whose looks are given."""

    metric = "loss"

    def __init__(self, *looks):
        self.looks, self.pruned = list(looks), ""

    def look(self):
        return self.looks.pop(0)

    def prune(self, reason):
        self.pruned = reason


def test_ray_gets_each_value_and_then_the_end(monkeypatch):
    monkeypatch.setattr("cpt.search.on_ray.SECONDS_BETWEEN_LOOKS", 0.0)
    run = FromList(([], None), ([(10, 3.0), (20, 2.0)], None), ([(30, 1.5)], Ending("complete", 1.5)))
    watched = Watched(run)
    assert watched.next_figures() == {"tokens": 20, "loss": 2.0}
    assert watched.next_figures() == {"tokens": 30, "loss": 1.5, "done": True}
    watched.end()
    assert not run.pruned


def test_a_trial_that_ray_ends_is_pruned_and_one_that_fails_says_why(monkeypatch):
    monkeypatch.setattr("cpt.search.on_ray.SECONDS_BETWEEN_LOOKS", 0.0)
    run = FromList(([(10, 3.0)], None), ([], None), ([], Ending("pruned")))
    watched = Watched(run)
    watched.next_figures()
    watched.end()
    assert run.pruned == "ended by Ray Tune at 10 tokens" and not run.looks
    with pytest.raises(TrainingError, match="no rows"):
        Watched(FromList(([], Ending("failed", reason="DataError: no rows")))).next_figures()


def test_results_are_read_from_the_trials_own_folders(tiny_recipe, tmp_path):
    _, recipe, root = recipe_in(tmp_path, tiny_recipe)
    record = claim(recipe, root, space_in(tmp_path))
    for number, state in enumerate(("finished", "pruned", "failed", "running")):
        ray, folder = record.folder / FOLDER / EXPERIMENT / f"trial-{number:03d}", record.run_of(number).folder
        ray.mkdir(parents=True)
        folder.mkdir()
        (ray / "params.json").write_text(
            json.dumps({"trial_number": number, "optimizer.learning_rate": 1e-3, "schedule.floor": "0.1"})
        )
        (folder / "status.json").write_text(json.dumps({"state": state, "message": "why"}))
        (folder / "metrics.jsonl").write_text('{"tokens": 100, "loss": 2.5}\n')
    found = [(one.number, one.state, one.value, one.tokens, one.reason) for one in results_of_runs(record)]
    assert found == [
        (0, "complete", 2.5, None, ""),
        (1, "pruned", 2.5, 100, ""),
        (2, "failed", 2.5, 100, "why"),
        (3, "under way", 2.5, 100, ""),
    ]
    record.lock.close()


def test_the_same_space_is_drawn_from(tmp_path):
    from cpt.search.library import optuna

    trial = optuna().create_study().ask()
    assert draw_all(space_in(tmp_path), trial) == {"trial_number": 0}
    assert trial.params.keys() == {"optimizer.learning_rate", "schedule.floor"}


@pytest.mark.slow
@pytest.mark.long
def test_two_trials_on_a_local_ray_that_is_killed_and_restored(tiny_recipe, tmp_path):
    path, *_ = recipe_in(tmp_path, tiny_recipe, checkpoints={"every_steps": 2})
    space = write_recipe(
        {**SPACE, "search": {**SPACE["search"], "trials": 2, "pruner": "none"}}, tmp_path / "space.yaml"
    )
    words = [sys.executable, "-m", "cpt.cli", "search", str(path), "--space", str(space), "--ray"]
    folder = tmp_path / "runs" / "tiny-search"
    first = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    while not (list(folder.glob("ray/tune/experiment_state-*")) and list(folder.glob("trial-*/heartbeats/*"))):
        assert first.poll() is None, first.stdout.read()
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = subprocess.run(words, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    states = {
        trial.parent.name: json.loads(trial.read_text())["state"] for trial in folder.glob("trial-*/status.json")
    }
    assert states == {"trial-000": "finished", "trial-001": "finished"} and (folder / "best.yaml").exists()
