"""The loop of a search, with a small program in place of `cpt train`."""

import json
import re
import sys
import textwrap

import pytest
import yaml
from tiny import write_recipe

from cpt.contrib.search import search as loop
from cpt.contrib.search.command import command, environments_of
from cpt.errors import Interrupted, LaunchError, RecipeError, ResourceError, TrainingError
from cpt.files import locked

TRIAL = "log(100, loss=abs(rate - 1e-3)); finish()"
SPACE = {"optimizer.learning_rate": {"low": 1e-5, "high": 1e-1, "log": True}, "seed": [1, 2, 3, 4]}
TRAIN = """
import json, os, pathlib, signal, sys, time
keys = dict(word.split("=", 1) for word in sys.argv[2:] if "=" in word)
folder = pathlib.Path(keys["output_dir"], keys["name"])
folder.mkdir(exist_ok=True)
rate, seed = float(keys["optimizer.learning_rate"]), int(keys["seed"])
with (folder / "starts").open("a") as file:
    file.write(f"{rate} {seed}\\n")
def status(state, **more): (folder / "status.json").write_text(json.dumps({"state": state, **more}))
def log(tokens, **figures):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"tokens": tokens, **figures}) + "\\n")
def finish():
    (folder / "final").mkdir(exist_ok=True)
    (folder / "final" / "config.json").touch()
    status("finished")
def at_signal(*_):
    status("interrupted", message="saved")
    os._exit(75)
signal.signal(signal.SIGTERM, at_signal)
signal.signal(signal.SIGINT, at_signal)
"""
pytestmark = pytest.mark.heavy  # each trial is a process


@pytest.fixture
def search(tiny_recipe, tmp_path, monkeypatch):
    """Run a search whose trials run this piece of code."""
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_LOOKS", 0.02)
    monkeypatch.chdir(tmp_path)
    write_recipe(tiny_recipe, tmp_path / "recipe.yaml")

    def run(code=TRIAL, *overrides, axes=SPACE, new=False, parallel=1, **settings):
        program = tmp_path / "train.py"
        program.write_text(TRAIN + textwrap.dedent(code))
        monkeypatch.setattr(loop, "TRAIN", (sys.executable, str(program)))
        settings = {"metric": "loss", "trials": 4, "seed": 1, "pruner": "none"} | settings
        space = tmp_path / "space.yaml"
        space.write_text(yaml.safe_dump({"search": settings, **axes}, sort_keys=False))
        command(tmp_path / "recipe.yaml", list(overrides), space, new=new, parallel=parallel)

    run.folder = tmp_path / "runs" / "tiny-search"
    return run


def results(search):
    return {
        one["number"]: one
        for one in json.loads((search.folder / "results.json").read_text())["trials"]
    }


def starts(search):
    return [path.read_text().splitlines() for path in sorted(search.folder.glob("trial-*/starts"))]


def test_a_signal_stops_the_trials_and_the_same_command_continues_them(search):
    code = """
        if not (folder / "go").exists():
            (folder / "go").touch()
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(60)
        log(100, loss=1.0)
        finish()
    """
    with pytest.raises(Interrupted):
        search(code, trials=1)
    assert not (search.folder / "trial-000/final").exists()
    search(code, trials=1)
    assert [len(lines) for lines in starts(search)] == [2] and results(search)[0][
        "state"
    ] == "complete"


def test_a_trial_among_the_worse_ones_is_pruned(search):
    code = """
        for step in range(1, 6):
            log(step * 100, loss=rate / step)
        if rate > 0.01:
            time.sleep(60)
        finish()
    """
    axes = {"optimizer.learning_rate": [0.001, 0.002, 0.05], "seed": [1]}
    search(code, axes=axes, sampler="grid", pruner={"name": "median", "n_startup_trials": 2})
    assert [one["state"] for one in results(search).values()] == ["complete", "complete", "pruned"]
    assert (
        json.loads((search.folder / "trial-002" / "status.json").read_text())["state"] == "pruned"
    )
    assert results(search)[2]["tokens"] is not None


@pytest.mark.parametrize(
    ("code", "reason"),
    [("print('no room'); sys.exit(3)", "no room"), ("log(100, other=1.0); finish()", "`loss`")],
)
def test_trials_that_fail_in_a_row_end_the_search_with_the_reason(search, code, reason):
    with pytest.raises(TrainingError, match=reason):
        search(code)
    states = [one["state"] for one in results(search).values()]
    assert states == ["fail"] * 3 and reason in results(search)[0]["reason"]


def test_a_loss_that_diverges_is_a_result(search):
    code = """
        if seed in (2, 3):
            log(1, loss=float("nan"))
        elif seed > 3:
            status("failed", error="TrainingError")
            sys.exit(2)
        else:
            log(100, loss=1.0)
        finish()
    """
    search(
        code,
        axes={"optimizer.learning_rate": [0.01], "seed": [1, 2, 3, 4, 5]},
        sampler="grid",
        trials=9,
    )
    assert [one["state"] for _, one in sorted(results(search).items())] == [
        "complete",
        *["fail"] * 4,
    ]


def test_only_the_best_trial_keeps_its_weights(search):
    search(
        "(folder / 'checkpoint-1').mkdir(); log(100, loss=abs(rate - 1e-3)); finish()", keep="best"
    )
    kept = {path.parent.name for path in search.folder.glob("trial-*/checkpoint-1")}
    best = min(results(search).values(), key=lambda one: one["value"])
    assert kept == {best["run"]} and (search.folder / best["run"] / "final").exists()


def test_another_recipe_or_other_choices_need_a_new_search(search):
    search(trials=1)
    with pytest.raises(RecipeError, match=r"optimizer.weight_decay"):
        search("finish()", "optimizer.weight_decay=0.3")
    with pytest.raises(RecipeError, match="--new"):
        search(axes=SPACE | {"seed": [1, 2]}, trials=2)
    search(axes=SPACE | {"seed": [1, 2]}, trials=1, new=True)
    assert (search.folder.parent / "tiny-search-2" / "best.yaml").exists()


def test_two_searches_of_one_folder_are_refused(search):
    search(trials=1)
    with locked(search.folder / ".lock", ""), pytest.raises(LaunchError):
        search()


def test_gpus_are_divided_among_the_trials(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert environments_of(2, 2) == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    with pytest.raises(ResourceError):
        environments_of(3, 2)


def test_a_range_test_suggests_a_tenth_of_the_rate_at_the_lowest_loss(
    search, tmp_path, monkeypatch, capsys
):
    (tmp_path / "runs").mkdir()
    program = tmp_path / "train.py"
    program.write_text(
        f"{TRAIN}\nfor step in range(1, 41): log(256 * step, loss=1 + abs(step - 20))\nfinish()"
    )
    monkeypatch.setattr(loop, "TRAIN", (sys.executable, str(program)))
    overrides = ["seed=1", f"output_dir={tmp_path / 'runs'}"]
    command(tmp_path / "recipe.yaml", overrides, learning_rates=(1e-5, 1e-1), steps=40)
    suggested = float(re.search(r"optimizer.learning_rate=(\S+),", capsys.readouterr().out)[1])
    assert (
        1e-4 <= suggested <= 3e-4
    )  # after half of the steps the rate is 1e-3; the smoothed loss is lowest later
