"""`cpt runs`: finding and listing runs."""

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
    write_run(tmp_path / "runs" / "search" / "bad[red]", failed, losses=[9.0, 8.0])
    return tmp_path / "runs"


def names(runs, *conditions, **options):
    return [run["name"] for run in list_runs(runs, conditions, **options).values()]


def test_runs_are_found_at_any_depth_but_not_inside_checkpoints(runs):
    write_run(runs / "good" / "checkpoint-20")
    write_run(runs / "good" / "final")
    assert sorted(names(runs)) == ["good", "search/bad[red]"]


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("state=finished", ["good"]),
        ("tag=long one", ["search/bad[red]"]),
        ("loss<3.5", ["good"]),
        ("loss > 5", ["search/bad[red]"]),
        ("tokens=20_480", ["good", "search/bad[red]"]),
        ("step=x", []),
    ],
)
def test_conditions_choose(runs, condition, found):
    assert sorted(names(runs, condition)) == found


def test_runs_are_sorted_and_those_that_lack_the_figure_come_last(runs):
    write_run(runs / "empty")
    (runs / "empty/metrics.jsonl").unlink()
    assert names(runs, order="loss") == ["good", "search/bad[red]", "empty"]
    assert names(runs, order="-loss") == ["search/bad[red]", "good", "empty"]


def test_a_wrong_column_or_condition_is_refused_with_the_right_ones(runs):
    with pytest.raises(RecipeError, match="`loss`"):
        list_runs(runs, ["los<3"])
    with pytest.raises(RecipeError, match="--sort.*zzzzzz.*name, stage"):
        list_runs(runs, order="-zzzzzz")
    for condition in ("loss", "loss<low"):
        with pytest.raises(RecipeError, match=f"--where '{condition}'"):
            list_runs(runs, [condition])
    with pytest.raises(CheckpointError, match="nowhere"):
        list_runs(runs / "nowhere")


def test_a_branch_names_the_checkpoint_that_it_began_from(runs, cpt):
    branch = write_run(runs / "branch")
    checkpoint = {"checkpoint": str(runs / "good" / "checkpoint-10")}
    (branch / "began_from.json").write_text(json.dumps(checkpoint))
    assert names(runs, "from=good/checkpoint-10") == ["branch"]
    assert names(runs, order="from")[0] == "branch"
    assert "good/checkpoint-10" in cpt("runs", runs)[1]
    assert json.loads(cpt("runs", runs, "--where", "name=good", "--json")[1])[0]["from"] is None


@pytest.mark.parametrize(
    "name", ["recipe.yaml", "status.json", "environment.json", "metrics.jsonl"]
)
def test_a_damaged_file_costs_only_its_own_columns(runs, name):
    of_other_types = {"stage": 5, "state": [], "steps": "x", "started": 3, "tags": 1}
    for content in (b"", b"{", b"\xff\x00", b"[1]", json.dumps(of_other_types).encode()):
        (runs / "good" / name).write_bytes(content)
        assert "good" in names(runs)


def test_a_run_is_found_by_its_path_or_its_name(runs):
    assert find_run(str(runs / "good")) == runs / "good"
    assert find_run("good", runs=runs) == runs / "good"
    with pytest.raises(CheckpointError, match=r"goood.*runs/good\?"):
        find_run(str(runs / "goood"))
    with pytest.raises(CheckpointError, match="recipe.yaml"):
        find_run(str(runs))
