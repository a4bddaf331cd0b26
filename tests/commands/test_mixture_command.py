import json

import pytest
from tiny import write_recipe

from cpt.cli import main


def run(*words):
    with pytest.raises(SystemExit) as ended:
        main(["mixture", *map(str, words)])
    return ended.value.code


def test_tables_tell_shares_epochs_and_the_verdict(tiny_recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    tiny_recipe["budget"] = {"tokens": 64_000}
    assert run(write_recipe(tiny_recipe, tmp_path / "r.yaml")) == 0
    shown = capsys.readouterr().out
    assert (
        "What tiny will read" in shown
        and "70.00%" in shown
        and "The mixture is reached: 64,000 tokens in 1,000 rows." in shown
    )


def test_json_is_all_that_is_printed(tiny_recipe, tmp_path, capsys):
    assert (
        run(
            write_recipe(tiny_recipe, tmp_path / "r.yaml"),
            "budget.tokens=64000",
            "budget.global_batch_tokens=null",
            "--json",
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    domain = told["sources"][0]
    assert (
        told["rows"] == 1000
        and domain["name"] == "domain"
        and domain["documents"] == 120
        and domain["asked"] == pytest.approx(0.7)
    )
    assert sum(domain["lengths"].values()) == 120


def test_a_run_that_would_be_refused_ends_with_code_2(tiny_recipe, tmp_path, capsys):
    tiny_recipe["data"]["sources"][0]["max_epochs"] = 1
    assert (
        run(
            write_recipe(tiny_recipe, tmp_path / "r.yaml"),
            "budget.tokens=10_000_000",
            "budget.global_batch_tokens=null",
        )
        == 2
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert "This run is refused: `max_epochs` of `domain`" in shown and "is not reached" in shown


def test_a_phase_that_ends_at_a_learning_rate_is_told_in_tokens_and_read_like_one_that_ends_there(
    tiny_recipe, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    phases = [{"until_learning_rate": 0.2, "weights": {"domain": 1, "general": 3}}, {"weights": {"domain": 1}}]
    tiny_recipe["data"] |= {
        "sources": [{"path": source["path"]} for source in tiny_recipe["data"]["sources"]],
        "phases": phases,
    }
    tiny_recipe |= {"budget": {"tokens": 64_000}, "schedule": {"name": "linear", "warmup_tokens": 6400}}
    path = write_recipe(tiny_recipe, tmp_path / "r.yaml")
    assert run(path, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    first, second = told["phases"]
    end = 64 * round((64_000 - 0.2 * (64_000 - 6400)) / 64)
    assert (first["end_token"], first["until_learning_rate"]) == (end, 0.2) and second["first_token"] == end
    assert first["seen"]["general"] == pytest.approx(0.75, abs=0.002) and second["seen"]["general"] == 0
    tiny_recipe["data"]["phases"][0] = {"until": end, "weights": {"domain": 1, "general": 3}}
    run(write_recipe(tiny_recipe, tmp_path / "in_tokens.yaml"), "--json")
    assert json.loads(capsys.readouterr().out)["sources"] == told["sources"]
    run(path)
    assert "(learning rate at 0.2 of its peak)" in " ".join(capsys.readouterr().out.split())
