import json

import pytest
from run_folders import write_run

from cpt.errors import CheckpointError, RecipeError
from cpt.runs.folder import find_run, list_runs


@pytest.fixture
def runs(tmp_path):
    def failed(recipe, status, **others):
        status.update(state="failed", step=7)
        recipe.update(stage="sft", tags=["a", "long one"])

    write_run(tmp_path / "runs" / "good")
    write_run(tmp_path / "runs" / "search" / "bad", failed, losses=[9.0, 8.0])
    return tmp_path / "runs"


def names(runs, *conditions, **options):
    return [run["name"] for run in list_runs(runs, conditions, **options).values()]


def test_runs_are_found_at_any_depth_but_not_inside_checkpoints(runs):
    write_run(runs / "good" / "checkpoint-20")
    write_run(runs / "good" / "final")
    assert sorted(names(runs)) == ["good", "search/bad"]


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("state=finished", ["good"]),
        ("tag=long one", ["search/bad"]),
        ("loss<3.5", ["good"]),
        ("loss > 5", ["search/bad"]),
        ("tokens=20_480", ["good", "search/bad"]),
        ("eval_domain_bits_per_byte<2", ["good", "search/bad"]),
        ("step=x", []),
    ],
)
def test_conditions_choose(runs, condition, found):
    if condition.startswith("tokens="):
        (runs / "search/bad/metrics.jsonl").write_text((runs / "good/metrics.jsonl").read_text())
    assert sorted(names(runs, condition)) == found


def test_runs_are_sorted_and_those_that_lack_it_come_last(runs):
    write_run(runs / "empty")
    (runs / "empty/metrics.jsonl").unlink()
    assert names(runs, order="loss") == ["good", "search/bad", "empty"]
    assert names(runs, order="-loss") == ["search/bad", "good", "empty"]


def test_a_wrong_column_or_condition_says_what_to_write(runs):
    with pytest.raises(RecipeError, match="Did you mean `loss`"):
        list_runs(runs, ["los<3"])
    with pytest.raises(RecipeError, match="--sort: there is no column `zzzzzz`. There are: name, stage"):
        list_runs(runs, order="-zzzzzz")
    with pytest.raises(RecipeError, match="--where 'loss'"):
        list_runs(runs, ["loss"])
    with pytest.raises(RecipeError, match="got `low`"):
        list_runs(runs, ["loss<low"])
    with pytest.raises(CheckpointError, match="is no folder"):
        list_runs(runs / "nowhere")


@pytest.mark.parametrize("name", ["recipe.yaml", "status.json", "environment.json", "metrics.jsonl"])
def test_a_broken_file_costs_only_what_it_tells(runs, name):
    for rubbish in (
        b"",
        b"{",
        b"\xff\x00",
        b"[1]",
        json.dumps({"stage": 5, "state": [], "steps": "x", "started": 3, "tags": 1}).encode(),
    ):
        (runs / "good" / name).write_bytes(rubbish)
        assert "good" in names(runs)


def test_a_run_is_found_by_its_path_or_its_name(runs):
    assert find_run(str(runs / "good")) == runs / "good"
    assert find_run("good", beside=runs) == runs / "good"
    with pytest.raises(CheckpointError, match=r"goood is not a run: .* Did you mean .*runs/good\?"):
        find_run(str(runs / "goood"))
    with pytest.raises(CheckpointError, match="has neither recipe.yaml"):
        find_run(str(runs))
