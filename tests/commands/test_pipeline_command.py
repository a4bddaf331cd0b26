"""Pre-training and a continuation in a row, through the command."""

import json
import signal
import sys

import pytest
import typer
from tiny import write_recipe

from cpt.commands.pipeline import command, end, load_pipeline, run_step
from cpt.errors import Interrupted, LaunchError


@pytest.fixture
def two_steps(tiny_recipe, tmp_path):
    """Sixteen steps each, saved every four."""
    long = {
        **tiny_recipe,
        "budget": {"tokens": 16 * 256, "global_batch_tokens": 256},
        "checkpoints": {"every_steps": 4},
    }
    write_recipe({**long, "name": "base"}, tmp_path / "base.yaml")
    write_recipe(
        {**long, "stage": "cpt", "name": "more", "model": {"path": "x"}, "tokenizer": {}}, tmp_path / "more.yaml"
    )
    steps = [{"recipe": "base.yaml"}, {"recipe": "more.yaml", "model.path": str(tmp_path / "runs" / "base")}]
    return write_recipe({"name": "two", "steps": steps}, tmp_path / "pipeline.yaml")


def test_mistakes_of_a_later_step_start_nothing(two_steps, tiny_recipe, tmp_path, capsys):
    bad = {**tiny_recipe, "name": "bad", "data": {**tiny_recipe["data"], "sources": [{"path": "gone.jsonl"}]}}
    write_recipe(bad, tmp_path / "bad.yaml")
    write_recipe({"name": "two", "steps": [{"recipe": "base.yaml"}, {"recipe": "bad.yaml"}]}, two_steps)
    with pytest.raises(typer.Exit) as ended:
        command(two_steps)
    said = capsys.readouterr().out
    assert (
        ended.value.exit_code == 2 and "gone.jsonl" in said and "1 of 2 steps cannot run. Nothing was started" in said
    )
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_starts_nothing_and_shows_where_each_run_stands(two_steps, tmp_path, capsys):
    command(two_steps, dry_run=True)
    said = capsys.readouterr().out
    assert "after step 1" in said and "base.yaml: no mistakes" in said and said.count("waiting") == 2
    assert not (tmp_path / "runs").exists()


def stand_in(run, **status):
    """What a step's process left."""
    run.folder.mkdir(parents=True)
    (run.folder / "status.json").write_text(json.dumps(status))


def test_a_step_that_fails_ends_the_pipeline_with_its_code_and_how_to_go_on(two_steps, capsys):
    pipeline = load_pipeline(two_steps)
    step = pipeline.steps[0]
    stand_in(step.run, state="failed", message="the loss is no number\nmore of it", step=3, steps=16)
    with pytest.raises(typer.Exit) as ended:
        end(pipeline, step, two_steps, 2, 0)
    said = capsys.readouterr().out
    assert ended.value.exit_code == 2 and "step 1, base, ended with exit code 2: the loss is no number" in said
    assert f"cpt pipeline {two_steps}" in said and "failed at 3 of 16" in said


@pytest.mark.parametrize(("code", "told"), [(75, signal.SIGTERM), (75, 0), (143, signal.SIGTERM)])
def test_a_step_that_was_told_to_stop_interrupts_the_pipeline(two_steps, code, told):
    pipeline = load_pipeline(two_steps)
    stand_in(pipeline.steps[0].run, state="interrupted", step=3, steps=16)
    with pytest.raises(Interrupted, match="step 1, base, stopped at step 3 of its run"):
        end(pipeline, pipeline.steps[0], two_steps, code, int(told))


WRITE_STATUS = """
import json, pathlib, sys
status = {"state": "failed", "exit_code": 2, "updated": "now"}
pathlib.Path(sys.argv[1], "status.json").write_text(json.dumps(status))
sys.exit(1)
"""


@pytest.mark.parametrize(
    ("script", "code"),
    [(WRITE_STATUS, 2), ("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_the_exit_code_is_that_of_the_run_and_not_of_its_launcher_or_an_earlier_start(two_steps, script, code):
    step = load_pipeline(two_steps).steps[0]
    stand_in(step.run, state="failed", exit_code=3, updated="before")
    assert run_step(step, [sys.executable, "-c", script, str(step.run.folder)]) == (code, 0)


def test_a_launcher_around_the_pipeline_is_refused(two_steps, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(LaunchError, match="--launcher"):
        command(two_steps)
