"""A trial's processes, with small programs in place of the training: they write what a run writes."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from cpt.runs.events import read_events
from cpt.runs.record import Run
from cpt.search.trial import TrialRun

RUN = """
import fcntl, json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
lock = (folder / ".lock").open("a+")
fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
starts = len(list(folder.glob("start-*")))
(folder / f"start-{starts}").touch()
def status(state, **s): (folder / "status.json").write_text(json.dumps({"updated": f"{starts}-{time.time()}", "state": state, **s}))
def log(tokens, **figures):
    with (folder / "metrics.jsonl").open("a") as file: file.write(json.dumps({"tokens": tokens, **figures}) + chr(10))
def finish():
    (folder / "final").mkdir(exist_ok=True)
    (folder / "final" / "config.json").touch()
    status("finished", exit_code=0)
def at_signal(*_):
    status("interrupted", error="Interrupted", exit_code=75, message="stopped")
    sys.exit(75)
signal.signal(signal.SIGTERM, at_signal)
status("running")
"""  # noqa: E501


def words_of(tmp_path, body):
    program = tmp_path / "run.py"
    program.write_text(RUN + textwrap.dedent(body))
    return [sys.executable, str(program), str(tmp_path / "trial-000")]


def trial_of(tmp_path, body, **options):
    return TrialRun(
        Run(tmp_path / "trial-000"), words_of(tmp_path, body), "loss", tmp_path / "logs" / "trial.log", **options
    )


def to_its_end(trial, until=lambda points: None):
    points, began = [], time.monotonic()
    while time.monotonic() - began < 20:
        new, ending = trial.look()
        points += new
        if ending is not None:
            return points, ending
        until(points)
        time.sleep(0.02)
    raise AssertionError("it did not end")


def starts(tmp_path):
    return len(list((tmp_path / "trial-000").glob("start-*")))


def wait_for(condition):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 20
        time.sleep(0.02)


def test_a_trial_that_finishes_has_the_figure_that_was_logged_last(tmp_path):
    points, ending = to_its_end(trial_of(tmp_path, "log(10, loss=3.0); log(20, other=1); log(30, loss=2.0); finish()"))
    assert points == [(10, 3.0), (30, 2.0)] and (ending.state, ending.value) == ("complete", 2.0)


@pytest.mark.parametrize(
    ("body", "reason", "is_of_values"),
    [
        ("print('no room'); sys.exit(3)", "ended with exit code 3: no room", False),
        ("os.kill(os.getpid(), 9)", "ended with SIGKILL", False),
        (
            "status('failed', error='DataError', message='no rows', exit_code=2); sys.exit(2)",
            "DataError: no rows",
            False,
        ),
        (
            "status('failed', error='TrainingError', message='diverged', exit_code=2); sys.exit(2)",
            "TrainingError: diverged",
            True,
        ),
        ("log(10, loss=float('nan')); finish()", "`loss` is nan", True),
        ("log(10, other=1); finish()", "no `loss` in", False),
    ],
)
def test_a_trial_that_fails_says_why(tmp_path, body, reason, is_of_values):
    _, ending = to_its_end(trial_of(tmp_path, body))
    assert ending.state == "failed" and reason in ending.reason and ending.is_of_values == is_of_values
    assert Run(tmp_path / "trial-000").status()["state"] in ("failed", "finished")


def test_a_trial_that_is_pruned_is_told_to_end_and_shows_it(tmp_path):
    trial = trial_of(tmp_path, "log(10, loss=3.0); time.sleep(60)")
    _, ending = to_its_end(
        trial, lambda points: points and not trial.told and trial.prune("not among the better ones")
    )
    status = Run(tmp_path / "trial-000").status()
    assert ending.state == "pruned" and (status["state"], status["message"]) == ("pruned", "not among the better ones")
    assert [event["kind"] for event in read_events(tmp_path / "trial-000")] == ["pruned"]


def test_a_pruned_trial_that_does_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("cpt.search.trial.SECONDS_OF_GRACE", 0.3)
    trial = trial_of(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); log(10, loss=3.0); time.sleep(60)")
    _, ending = to_its_end(trial, lambda points: points and not trial.told and trial.prune("bad"))
    assert ending.state == "pruned"


def test_a_trial_that_was_to_be_pruned_when_the_search_died_is_not_started(tmp_path):
    (tmp_path / "trial-000").mkdir()
    _, ending = to_its_end(trial_of(tmp_path, "finish()", pruned="bad"))
    assert ending.state == "pruned" and starts(tmp_path) == 0


def test_a_run_that_learned_from_running_out_of_memory_is_started_again(tmp_path):
    body = """
        if starts < 2:
            status("interrupted", error="RestartNeeded", exit_code=75, message="halved")
            sys.exit(75)
        log(10, loss=1.0)
        finish()
    """
    assert to_its_end(trial_of(tmp_path, body))[1].state == "complete" and starts(tmp_path) == 3


def test_a_run_that_others_told_to_stop_has_stopped_and_goes_on_when_it_is_started_again(tmp_path):
    body = "log(10 * (starts + 1), loss=1.0)\nif starts: finish()\nelse: time.sleep(60)"
    trial = trial_of(tmp_path, body)
    _, ending = to_its_end(trial, lambda points: points and trial.stop(signal.SIGTERM))
    assert ending.state == "stopped"
    points, ending = to_its_end(trial_of(tmp_path, body))
    assert ending.state == "complete" and points == [(10, 1.0), (20, 1.0)]


def test_a_process_that_a_killed_search_left_is_watched_and_no_other_is_started(tmp_path):
    folder = tmp_path / "trial-000"
    folder.mkdir()
    orphan = subprocess.Popen(
        words_of(tmp_path, "while not (folder / 'go').exists(): time.sleep(0.02)\nlog(10, loss=1.0); finish()")
    )
    wait_for(lambda: starts(tmp_path) == 1 and (folder / "status.json").exists())
    trial = trial_of(tmp_path, "while not (folder / 'go').exists(): time.sleep(0.02)\nlog(10, loss=1.0); finish()")
    assert trial.look() == ([], None) and trial.child is None
    (folder / "go").touch()
    orphan.wait()
    points, ending = to_its_end(trial)
    assert ending.state == "complete" and points == [(10, 1.0)] and starts(tmp_path) == 1


def test_where_the_left_process_dies_too_the_trial_is_started_again(tmp_path):
    folder = tmp_path / "trial-000"
    folder.mkdir()
    orphan = subprocess.Popen(words_of(tmp_path, "time.sleep(60)"))
    wait_for(lambda: (folder / "status.json").exists())
    trial = trial_of(tmp_path, "log(10, loss=1.0); finish()")
    assert trial.look()[1] is None and trial.is_adopted
    orphan.kill()
    orphan.wait()
    assert to_its_end(trial)[1].state == "complete" and starts(tmp_path) == 2


def test_a_process_that_the_search_could_not_see_yet_is_found_when_its_own_is_refused(tmp_path):
    folder = tmp_path / "trial-000"
    folder.mkdir()
    body = "while not (folder / 'go').exists(): time.sleep(0.02)\nlog(10, loss=1.0); finish()"
    late = subprocess.Popen(
        [sys.executable, "-c", f"import time, subprocess; time.sleep(0.3); subprocess.run({words_of(tmp_path, body)})"]
    )
    program = tmp_path / "refused.py"
    program.write_text(
        "import pathlib, sys, time\nwhile not list(pathlib.Path(sys.argv[1]).glob('start-*')):"
        " time.sleep(0.02)\nsys.exit(2)"
    )
    trial = TrialRun(Run(folder), [sys.executable, str(program), str(folder)], "loss", tmp_path / "log")
    wait_for(lambda: trial.child.poll() is not None)
    assert trial.look()[1] is None and trial.is_adopted
    (folder / "go").touch()
    late.wait()
    assert to_its_end(trial)[1].state == "complete" and starts(tmp_path) == 1


def test_a_process_that_was_refused_by_one_that_has_ended_since_is_started_again(tmp_path):
    body = """
        if not starts: sys.exit("LaunchError: the run is being trained already")
        log(10, loss=1.0)
        finish()
    """
    assert to_its_end(trial_of(tmp_path, body))[1].state == "complete" and starts(tmp_path) == 2


def test_a_finished_run_is_read_and_not_started(tmp_path):
    to_its_end(trial_of(tmp_path, "log(10, loss=1.5); finish()"))
    trial = trial_of(tmp_path, "sys.exit(1)")
    assert trial.child is None and to_its_end(trial)[1].value == 1.5


def test_each_trial_has_its_own_environment_and_log(tmp_path):
    trial = trial_of(
        tmp_path, "print(os.environ['CUDA_VISIBLE_DEVICES']); finish()", environment={"CUDA_VISIBLE_DEVICES": "2,3"}
    )
    to_its_end(trial)
    assert (tmp_path / "logs" / "trial.log").read_text() == "2,3\n" and "CUDA_VISIBLE_DEVICES" not in os.environ
