import subprocess
import sys
from pathlib import Path

from tiny import write_recipe
from typer.testing import CliRunner

from cpt.cli import application
from cpt.data.build import build_data
from cpt.data.store_entries import entries
from cpt.prepare import prepare_recipe
from cpt.recipe.load import load_recipe
from cpt.tokenizer.load import load_tokenizer


def test_a_prepared_run_finds_everything_in_the_store(tiny_recipe, tmp_path):
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "tiny.yaml"))
    prepared = prepare_recipe(recipe, tmp_path / "cache")
    before = {file: file.stat().st_ino for file in (tmp_path / "cache").rglob("*") if file.is_file()}
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    built = build_data(
        recipe.data, tokenizer, seed=recipe.seed, evaluation=recipe.evaluation, budget=recipe.budget, cache_dir=tmp_path / "cache"
    )
    assert built.fingerprint == prepared.fingerprint
    assert before == {file: file.stat().st_ino for file in (tmp_path / "cache").rglob("*") if file.is_file()}


def test_the_command_says_what_is_ready(tiny_recipe, tmp_path):
    path = write_recipe(tiny_recipe, tmp_path / "tiny.yaml")
    told = CliRunner().invoke(application("prepare"), ["prepare", str(path), "--cache", str(tmp_path / "cache")])
    assert told.exit_code == 0 and "tokens of 240 documents are ready" in told.output
    assert {entry.kind for entry in entries(tmp_path / "cache")} == {"tokens", "rows"}


def test_of_a_bounded_disk_only_the_beginning_is_prepared(tiny_recipe, tmp_path):
    tiny_recipe["data"] |= {"window_bytes": 4_000, "disk_bytes": 40_000}
    path = write_recipe(tiny_recipe, tmp_path / "tiny.yaml")
    told = CliRunner().invoke(application("prepare"), ["prepare", str(path), "--cache", str(tmp_path / "cache")])
    assert told.exit_code == 0 and "Of domain, general only what a run begins with" in told.output


def test_a_wrong_recipe_prepares_nothing(tmp_path):
    ended = subprocess.run([sys.executable, "-m", "cpt.cli", "prepare", tmp_path / "none.yaml"], capture_output=True, text=True)
    assert ended.returncode == 2 and "RecipeError" in ended.stderr and not Path(tmp_path / "cache").exists()
