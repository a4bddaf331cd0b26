import json

import pytest
from launching import launch
from tiny import write_documents, write_recipe

from cpt.cli import main
from cpt.recipe.load import load_recipe
from cpt.train import train


@pytest.fixture
def recipe(tiny_recipe, corpus, tmp_path):
    """Of a run that goes on from a base, judged on domain and general text."""
    train(load_recipe(write_recipe({**tiny_recipe, "name": "base"}, tmp_path / "base.yaml")))
    held_out = {"domain": write_documents(tmp_path / "held_out.jsonl", 60, 9), "general": corpus / "held_out.jsonl"}
    sets = [{"path": str(path), "name": name} for name, path in held_out.items()]
    return {
        **tiny_recipe,
        "stage": "cpt",
        "model": {"path": str(tmp_path / "runs" / "base" / "final")},
        "evaluation": {
            "perplexity": sets,
            "retain": {"general": None},
            "tasks": [{"name": "domain_test", "questions": 30}],
        },
    }


def judged(folder):
    content = json.loads((folder / "verdict.json").read_text())
    return content["is_complete"], len(content["domain_test"]), content["contamination"]["judged"]


@pytest.mark.long
def test_a_run_ends_with_its_whole_verdict_which_its_card_holds_too(recipe, tmp_path):
    told = launch(write_recipe(recipe, tmp_path / "r.yaml"), way="cpt").stdout
    folder = tmp_path / "runs" / "tiny"
    assert judged(folder)[0] and judged(folder)[2] == 71  # one of 72 is too short
    last = told.strip().splitlines()[-1]
    assert f"The page: {folder / 'verdict.md'}." in last and f"cpt serve {folder / 'final'}" in last
    card = (folder / "final" / "README.md").read_text()
    assert "training documents hold half or more of one of 71" in card and "cpt serve tiny" in card


@pytest.mark.long
def test_several_processes_end_with_it_too(recipe, tmp_path):
    ended = launch(write_recipe(recipe, tmp_path / "r.yaml"), way="torchrun", processes=2)
    assert ended.returncode == 0, ended.stderr
    assert judged(tmp_path / "runs" / "tiny")[0] and "serve it: cpt serve" in ended.stdout


def test_a_run_that_is_not_finished_has_no_verdict(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["verdict", str(tmp_path)])
    assert ended.value.code == 2 and str(tmp_path) in capsys.readouterr().err
