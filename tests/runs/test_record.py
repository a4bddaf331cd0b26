"""What a run writes about itself: its folder, its status, and the lock that keeps others away."""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from full_disk import files_end_at
from tiny_run import damage, save_checkpoint

from cpt.checkpoints.resume import wanted_checkpoint
from cpt.errors import CheckpointError, DataError, Interrupted, RecipeError
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe
from cpt.runs.events import read_events
from cpt.runs.record import Run, deciding_variables, git_state, lock_run, start_run
from cpt.train import train
from cpt.training.changes import RecipeChanges
from cpt.training.restart import learned_micro_batch, remember_micro_batch


def recipe(folder, **changes):
    sections = {
        "name": "a-run",
        "output_dir": folder,
        "model": {"path": "some/model"},
        "data": {"sources": [{"path": "a.txt"}]},
        "budget": {"tokens": 1000},
    }
    return Recipe.model_validate({**sections, **changes})


def started(recipe, **options):
    return start_run(recipe, check=RecipeChanges(recipe).check, **options)


def test_a_later_start_is_recorded_with_what_differs_from_the_first(tmp_path, monkeypatch):
    run = started(recipe(tmp_path))
    run.write_status("running")
    (run.folder / "metrics.jsonl").touch()
    assert not (run.folder / "starts.jsonl").exists()
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    started(recipe(tmp_path))
    (line,) = map(json.loads, (run.folder / "starts.jsonl").read_text().splitlines())
    assert line.keys() == {"started", "variables"} and line["variables"]["OMP_NUM_THREADS"] == "77"


def test_a_start_that_failed_before_its_first_step_is_no_record(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    run = started(recipe(tmp_path))
    with pytest.raises(RecipeError), run.reporting():
        raise RecipeError("a mistake")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    started(recipe(tmp_path))
    environment = json.loads((run.folder / "environment.json").read_text())
    assert environment["variables"]["OMP_NUM_THREADS"] == "3"
    assert not (run.folder / "starts.jsonl").exists()


def test_a_start_that_fails_leaves_a_finished_run_finished(tmp_path):
    run = started(recipe(tmp_path))
    with run.reporting():
        run.write_status("running", step=5)
    before = run.status()
    with pytest.raises(CheckpointError), Run(run.folder).reporting():
        raise CheckpointError("--resume names a damaged checkpoint")
    assert run.status() == before
    with pytest.raises(CheckpointError), Run(run.folder).reporting():
        run.write_status("running", step=6)
        raise CheckpointError("the disk failed after another step")
    assert run.status()["state"] == "failed"


@pytest.mark.parametrize("state", ["running", "finished"])
def test_a_signal_while_the_state_is_written_is_recorded(tmp_path, monkeypatch, state):
    run = started(recipe(tmp_path))
    write_status = Run.write_status

    def interrupted(self: Run, written: str, **values: object) -> None:
        write_status(self, written, **values)
        if written == state:
            raise Interrupted("SIGTERM arrived outside of training.")

    monkeypatch.setattr(Run, "write_status", interrupted)
    with pytest.raises(Interrupted), run.reporting():
        pass
    assert run.status()["state"] == "interrupted" and run.status()["exit_code"] == 75


def test_the_function_for_an_end_without_an_exception_is_given_before_the_first_state(tmp_path):
    run = started(recipe(tmp_path))
    given = []

    def record_with(record_end: Callable[[BaseException], None]) -> None:
        given.append(run.status().get("state"))
        record_end(Interrupted("SIGTERM arrived outside of training."))
        given.append(run.status()["state"])

    with run.reporting(record_with):
        given.append(run.status()["state"])
    assert given == [None, "interrupted", "running"] and run.status()["state"] == "finished"


def test_a_mistyped_checkpoint_is_refused_before_anything_is_written(tmp_path):
    for wanted in ("latest", "none"):
        assert wanted_checkpoint(wanted) == wanted
    with pytest.raises(CheckpointError, match="checkpoint-1O0: no such folder"):
        wanted_checkpoint(str(tmp_path / "checkpoint-1O0"))
    with pytest.raises(CheckpointError):
        train(recipe(tmp_path), resume=tmp_path / "checkpoint-1O0")
    assert not (tmp_path / "a-run").exists()


def test_a_note_without_a_change_is_reported_as_not_recorded(tmp_path, capsys):
    given = recipe(tmp_path)
    started(given)
    RecipeChanges(given, note="nothing new").check(tmp_path / "a-run")
    assert "--note" in capsys.readouterr().out


def test_only_variables_that_decide_figures_are_recorded(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", "secret")
    variables = deciding_variables()
    assert variables["OMP_NUM_THREADS"] == "3" and "HF_TOKEN" not in variables


def test_the_uncommitted_change_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\n")
    for command in ("init -q", "add a.txt", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", *command.split()], check=True)
    (tmp_path / "a.txt").write_text("two\n")
    state = git_state()
    assert state is not None and len(state["commit"]) == 40 and "+two" in state["diff"]


def test_a_run_that_failed_before_its_first_step_may_start_with_another_recipe(tmp_path):
    run = started(recipe(tmp_path))
    with pytest.raises(DataError), run.reporting():
        raise DataError("no documents")
    assert started(recipe(tmp_path, budget={"tokens": 2000})).folder == run.folder
    assert "2000" in (run.folder / "recipe.yaml").read_text()
    (run.folder / "metrics.jsonl").touch()
    with pytest.raises(RecipeError, match="budget.tokens: 2000 -> 1000"):
        started(recipe(tmp_path))


def test_a_run_that_began_with_new_says_how_to_continue_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CPT_CONTINUE", "restored after the test")
    monkeypatch.setattr(sys, "argv", ["cpt", "train", "r.yaml", "--new"])
    names = [started(recipe(tmp_path), new=True).folder.name for _ in range(3)]
    assert names == ["a-run", "a-run-2", "a-run-3"] and "name=a-run-3" in capsys.readouterr().out


# --- status.json -----------------------------------------------------------------------------------------------------


def test_the_status_says_how_the_run_ended_and_it_is_finished_only_with_its_model(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(DataError), run.reporting():
        assert run.status()["state"] == "running"
        raise DataError("a.txt is empty")
    assert (run.status()["state"], run.status()["error"], run.status()["exit_code"]) == (
        "failed",
        "DataError",
        2,
    )
    with run.reporting():
        pass
    assert (run.status()["state"], run.status()["exit_code"]) == (
        "finished",
        0,
    ) and not run.is_finished
    run.export_folder.mkdir()
    (run.export_folder / "config.json").write_text("{}")
    assert run.is_finished


def test_a_full_disk_ends_no_run_because_of_its_status_or_plan(tmp_path):
    run = Run(tmp_path)
    with files_end_at(0):
        run.put_status("running")
        run.record_plan({"gpu_total_gib": 20.5}, recipe(tmp_path))
    assert run.status() == {} and not (tmp_path / "plan.json").exists()


# --- the lock; two runs of one name: tests/promises/test_a_run.py ----------------------------------------------------


def test_a_disk_without_locks_stops_no_run(tmp_path, monkeypatch):
    def without_locks(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", without_locks)
    assert lock_run(tmp_path) is None


def forked(work):
    """The id of a process of this program that only does this."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def test_a_forked_worker_that_outlives_its_run_does_not_hold_the_lock(tmp_path):
    lock = lock_run(tmp_path)
    worker = forked(lambda: time.sleep(20))
    lock.close()
    _, status = os.waitpid(forked(lambda: lock_run(tmp_path)), 0)
    os.kill(worker, 9)
    os.waitpid(worker, 0)
    assert status == 0


# --- the recipe's record ---------------------------------------------------------------------------------------------


def test_a_lost_recipe_that_no_checkpoint_has_needs_to_be_accepted(tmp_path):
    """As of a run whose checkpoints an older version wrote."""
    wanted = recipe(tmp_path)
    save_checkpoint(tmp_path / "a-run", 4)
    with pytest.raises(RecipeError, match=r"recipe\.yaml .*--change"):
        started(wanted)
    start_run(wanted, check=RecipeChanges(wanted, accept=True).check)
    assert "budget" in (tmp_path / "a-run" / "recipe.yaml").read_text()


def test_an_edit_of_the_recipe_in_the_runs_folder_is_a_change(tmp_path):
    folder = started(recipe(tmp_path)).folder
    (folder / "metrics.jsonl").touch()
    file = folder / "recipe.yaml"
    file.write_text(file.read_text().replace("tokens: 1000", "tokens: 2000"))
    with pytest.raises(RecipeError, match="budget.tokens: 1000 -> 2000"):
        started(load_recipe(file))
    started(recipe(tmp_path))
    assert "tokens: 1000" in file.read_text()
    assert [event["kind"] for event in read_events(folder)] == ["damaged_file"]


def test_a_start_without_damage_writes_no_event(tmp_path):
    folder = started(recipe(tmp_path)).folder
    (folder / "metrics.jsonl").touch()
    started(recipe(tmp_path))
    assert read_events(folder) == []


def test_what_was_learned_is_read_from_an_intact_file_only(tmp_path):
    remember_micro_batch(tmp_path, 1, 2)
    assert learned_micro_batch(tmp_path, 1) == 2
    damage(tmp_path / "learned.json", "bit flip")
    assert learned_micro_batch(tmp_path, 1) is None
    (tmp_path / "learned.json").write_text('{"micro_batch": {"1": 4}}')  # of an older version
    assert learned_micro_batch(tmp_path, 1) == 4
