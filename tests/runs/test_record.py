import errno
import json
import os
import subprocess
import sys
import time

import pytest
from full_disk import files_end_at

from cpt.errors import CheckpointError, DataError, LaunchError, RecipeError
from cpt.recipe.schema import Recipe
from cpt.runs.record import Run, hold, start_run


def recipe(folder, **changes):
    sections = {
        "name": "a-run",
        "output_dir": folder,
        "model": {"path": "some/model"},
        "data": {"sources": [{"path": "a.txt"}]},
        "budget": {"tokens": 1000},
    }
    return Recipe.model_validate({**sections, **changes})


def test_a_run_starts_with_its_recipe_and_environment_on_record(tmp_path):
    run = start_run(recipe(tmp_path))
    assert {path.name for path in run.folder.iterdir()} == {"recipe.yaml", "environment.json", ".lock"}


def test_a_later_start_is_recorded_with_what_differs_from_the_first(tmp_path, monkeypatch):
    run = start_run(recipe(tmp_path))
    run.write_status("running")
    assert not (run.folder / "starts.jsonl").exists()
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    start_run(recipe(tmp_path))
    (line,) = (run.folder / "starts.jsonl").read_text().splitlines()
    assert (
        json.loads(line).keys() == {"started", "variables"}
        and json.loads(line)["variables"]["OMP_NUM_THREADS"] == "77"
    )


def test_a_status_or_plan_that_cannot_be_written_ends_no_run(tmp_path):
    run = Run(tmp_path)
    with files_end_at(0):
        run.put_status("running")
        run.record_plan({"gpu_total_gib": 20.5}, recipe(tmp_path))
    assert run.status() == {} and not (tmp_path / "plan.json").exists()


def test_a_new_run_takes_the_next_free_name(tmp_path):
    names = [start_run(recipe(tmp_path), new=True).folder.name for _ in range(3)]
    assert names == ["a-run", "a-run-2", "a-run-3"]


def test_a_disk_that_knows_no_locks_stops_no_run(tmp_path, monkeypatch):
    def without_locks(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", without_locks)
    assert hold(tmp_path) is None


def test_another_recipe_under_the_same_name_is_refused_with_what_differs(tmp_path):
    start_run(recipe(tmp_path))
    with pytest.raises(RecipeError, match=r"budget.tokens.*1000.*2000(.|\n)*--new"):
        start_run(recipe(tmp_path, budget={"tokens": 2000}))


def test_a_run_that_failed_before_its_first_step_takes_another_recipe(tmp_path):
    run = start_run(recipe(tmp_path))
    with pytest.raises(DataError), run.reporting():
        raise DataError("no documents")
    assert start_run(recipe(tmp_path, budget={"tokens": 2000})).folder == run.folder
    assert "2000" in (run.folder / "recipe.yaml").read_text()
    (run.folder / "metrics.jsonl").touch()
    with pytest.raises(RecipeError):
        start_run(recipe(tmp_path))


def test_the_status_tells_how_the_run_ended(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(DataError), run.reporting():
        assert run.status()["state"] == "running"
        raise DataError("a.txt is empty")
    assert (run.status()["state"], run.status()["error"], run.status()["exit_code"]) == ("failed", "DataError", 2)
    with run.reporting():
        pass
    assert (run.status()["state"], run.status()["exit_code"]) == ("finished", 0)


def test_a_run_is_finished_only_with_its_exported_model(tmp_path):
    run = Run(tmp_path)
    with run.reporting():
        pass
    assert not run.is_finished
    run.export_folder.mkdir()
    (run.export_folder / "config.json").write_text("{}")
    assert run.is_finished


def test_changed_data_are_refused_on_the_way_back(tmp_path):
    run = Run(tmp_path)
    run.record_inputs("abc", lambda: {"data": {"fingerprint": "abc"}})
    run.record_inputs("abc", lambda: pytest.fail("described twice"))
    with pytest.raises(CheckpointError, match="began with other data"):
        run.record_inputs("def", dict)
    assert json.loads((tmp_path / "inputs.json").read_text())["data"]["fingerprint"] == "abc"


HOLDER = """
import sys, time
from pathlib import Path
from cpt.runs.record import hold
lock = hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_run_that_is_being_trained_is_refused_to_others_until_that_process_is_gone(tmp_path):
    folder = start_run(recipe(tmp_path)).folder
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(LaunchError, match=rf"is being trained already, by process {holder.pid} on .* --new"):
            start_run(recipe(tmp_path))
    finally:
        holder.kill()
        holder.wait()
    assert start_run(recipe(tmp_path)).lock is not None


def test_a_forked_worker_that_outlives_its_run_does_not_keep_the_lock(tmp_path):
    lock = hold(tmp_path)
    assert lock is not None
    pid = os.fork()
    if pid == 0:
        time.sleep(20)
        os._exit(0)
    lock.close()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    finally:
        holder.kill()
        holder.wait()
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_a_run_that_began_with_new_says_how_to_continue_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CPT_CONTINUE", "restored after the test")
    monkeypatch.setattr(sys, "argv", ["cpt", "train", "r.yaml", "--new"])
    start_run(recipe(tmp_path), new=True)
    assert "name=a-run" in capsys.readouterr().out
