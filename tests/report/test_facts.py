from dataclasses import replace

import pytest

from cpt.report.facts import facts, headline, seconds_in_steps
from cpt.runs.folder import read_metrics


def test_the_headline_is_the_verdicts_or_how_the_run_stands(record):
    assert headline(record) == "It worked: 10 % fewer bits per byte."
    assert headline(replace(record, verdict={})).startswith("Finished after 100 steps")


def test_the_facts_say_what_was_trained_where_and_with_which_code(record):
    told = dict(facts(record).pairs)
    assert told["base"] == "base/final" and told["tokens"] == "1,600 of 1,600" and told["steps"] == "100 of 100"
    assert told["GPU"] == "2 × NVIDIA H100" and told["machine"] == "a processor, 4 cores, 24 GiB"
    assert told["code"] == "commit 0123456789ab with uncommitted changes in 1 file"
    assert told["command"] == "cpt train 'recipes/code recipe.yaml'"
    assert (told["cost"], told["MFU"], told["started"]) == ("1.00", "40.0 %", "2026-01-02 03:04:05 UTC")


def test_the_cost_names_the_price_that_it_was_counted_by(record):
    callbacks = ["my_lab:watch", {"name": "alert"}, {"name": "cost", "dollars_per_gpu_hour": 2.5}]
    priced = replace(record, recipe={"monitoring": {"callbacks": callbacks}})
    assert dict(facts(priced).pairs)["cost"] == "1.00 at 2.5 per GPU hour"


def test_code_without_changes_and_code_without_git_are_told_apart(record):
    clean = replace(record, environment={**record.environment, "git": {"commit": "ab" * 20, "changes": ""}})
    assert dict(facts(clean).pairs)["code"] == "commit abababababab, nothing uncommitted"
    assert dict(facts(replace(record, environment={"git": None})).pairs)["code"] == "no git repository"


def test_new_weights_and_adapters_are_told(record):
    model = {"from_scratch": True, "path": "config", "lora": {"r": 16, "target_modules": ["q"]}}
    told = dict(facts(replace(record, recipe={**record.recipe, "model": model})).pairs)
    assert (told["base"], told["adapter"]) == ("new weights", "r 16")


def test_what_is_not_known_is_left_out(lone_record):
    assert {name for name, _ in facts(lone_record).pairs} == {"model", "base", "stage", "optimizer", "seed"}


def test_the_time_in_steps_is_that_of_the_tokens_at_their_speed(record, tmp_path):
    assert seconds_in_steps(record) == pytest.approx(16)
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "tokens": 100, "tokens_per_second": 50}\n{"tokens": 300, "tokens_per_second": 0}\n'
    )
    assert seconds_in_steps(replace(record, metrics=read_metrics(tmp_path))) == 2
