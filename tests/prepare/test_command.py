import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_recipe
from typer.testing import CliRunner

from cpt.cli import application
from cpt.data.build import build_data
from cpt.data.store.entries import entries
from cpt.data.store.shares import Done
from cpt.errors import RecipeError
from cpt.prepare.whole import prepare_recipe
from cpt.recipe.load import load_recipe
from cpt.tokenizer.load import load_tokenizer


def test_a_prepared_run_finds_everything_in_the_store(tiny_recipe, tmp_path):
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "tiny.yaml"))
    prepared = prepare_recipe(recipe, tmp_path / "cache")
    before = {file: file.stat().st_ino for file in (tmp_path / "cache").rglob("*") if file.is_file()}
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    built = build_data(
        recipe.data,
        tokenizer,
        seed=recipe.seed,
        evaluation=recipe.evaluation,
        budget=recipe.budget,
        cache_dir=tmp_path / "cache",
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


@pytest.mark.slow
def test_a_wrong_recipe_prepares_nothing(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "cpt.cli", "prepare", tmp_path / "none.yaml"], capture_output=True, text=True
    )
    assert ended.returncode == 2 and "RecipeError" in ended.stderr and not Path(tmp_path / "cache").exists()


def test_the_last_worker_of_several_puts_all_together(tiny_recipe, tmp_path):
    path = write_recipe(tiny_recipe, tmp_path / "tiny.yaml")
    told = CliRunner().invoke(
        application("prepare"), ["prepare", str(path), "--share", "2/3", "--cache", str(tmp_path / "cache")]
    )
    assert told.exit_code == 0 and "Made 2 of 2 shards as worker 2/3" in told.output
    assert "tokens of 240 documents are ready" in told.output


def test_a_worker_whose_fellows_are_still_at_work_leaves_the_rest_to_them(tiny_recipe, tmp_path, monkeypatch):
    path = write_recipe(tiny_recipe, tmp_path / "tiny.yaml")
    monkeypatch.setattr("cpt.prepare.command.prepare_share", lambda *_: Done(1, 3, 2))
    told = CliRunner().invoke(application("prepare"), ["prepare", str(path), "--share", "1/3"])
    assert (
        "Others are at the last 2" in told.output
        and f"cpt prepare {path}" in told.output
        and "are ready" not in told.output
    )


@pytest.mark.parametrize(
    ("words", "complaint"), [(["--workers", "2"], "--ray"), (["--share", "1/2", "--ray"], "Leave one of the two out")]
)
def test_options_that_do_not_go_together_are_told(tiny_recipe, tmp_path, words, complaint):
    path = write_recipe(tiny_recipe, tmp_path / "tiny.yaml")
    ended = CliRunner().invoke(application("prepare"), ["prepare", str(path), *words])
    assert isinstance(ended.exception, RecipeError) and complaint in str(ended.exception)
