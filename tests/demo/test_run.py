import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.demo.run import FOLDER, RECIPES, command, moved_paths
from cpt.recipe.load import load_recipe


@pytest.mark.parametrize("name", ["demo.yaml", "demo/pretrain.yaml"])
def test_another_folder_moves_every_path_of_the_recipe(name):
    recipe = load_recipe(RECIPES / name, moved_paths(RECIPES / name, Path("elsewhere/deep")))
    text = recipe.model_dump_json()
    assert str(FOLDER) not in text
    assert text.count("elsewhere/deep") == load_recipe(RECIPES / name).model_dump_json().count(str(FOLDER))


def test_the_recipes_agree_on_what_is_held_out():
    base, continued = load_recipe(RECIPES / "demo/pretrain.yaml"), load_recipe(RECIPES / "demo.yaml")
    assert base.evaluation.perplexity == continued.evaluation.perplexity
    assert base.data.sequence_length == continued.data.sequence_length


def test_seeds_that_are_no_numbers_are_refused():
    with pytest.raises(typer.BadParameter, match="1,2,3"):
        command(seeds="1 2")


@pytest.mark.slow
def test_the_whole_demo_at_a_fraction_of_its_size(tmp_path):
    """Corpus, tokenizer, both recipes, summary and export, through the command line; a second start finds all of it done."""
    short = ["budget.tokens=20_480", "schedule.warmup_tokens=2_048", "training.logging_steps=5"]
    arguments = [sys.executable, "-m", "cpt.cli", "demo", "--folder", "demo", "--seeds", "1,2", *short]
    environment = {**os.environ, "CPT_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(RECIPES.parent)}
    answer = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert answer.returncode == (0 if summary["passed"] else 1), answer.stderr[-3000:]
    assert [row["run"] for row in summary["rows"]] == ["demo-seed1", "demo-seed2"]
    assert all(row["domain_after"] < row["domain_before"] < 4 for row in summary["rows"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / summary["model"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / summary["model"])
    written = model.generate(**tokenizer("def f(", return_tensors="pt"), max_new_tokens=4)
    assert tokenizer.decode(written[0], skip_special_tokens=True).startswith("def f(")
    before = (tmp_path / "demo" / "demo-seed2" / "metrics.jsonl").stat().st_mtime_ns
    subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, timeout=300)
    assert (tmp_path / "demo" / "demo-seed2" / "metrics.jsonl").stat().st_mtime_ns == before
