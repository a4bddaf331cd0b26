import os
import signal
import sys
import textwrap
import threading

import pytest

from cpt.pipeline.processes import StepProcess, refuse_a_launcher
from cpt.runs.record import Run

RUN = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def status(**s): (folder / "status.json").write_text(json.dumps({"updated": str(time.time()), **s}))
"""


def process_of(tmp_path, body, **options):
    """A stand-in for a run."""
    (tmp_path / "run.py").write_text(RUN + textwrap.dedent(body))
    return StepProcess(Run(tmp_path), [sys.executable, str(tmp_path / "run.py"), str(tmp_path)], **options)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("status(state='finished', exit_code=0)", 0),
        ("status(state='failed', exit_code=2); sys.exit(1)", 2),  # as torchrun ends where a process ended with 2
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), 9)", 137),
    ],
)
def test_the_code_is_that_of_the_runs_own_process(tmp_path, body, code):
    assert process_of(tmp_path, body).wait() == code


def test_the_code_of_an_earlier_start_does_not_count(tmp_path):
    (tmp_path / "status.json").write_text('{"state": "failed", "exit_code": 2, "updated": "before"}')
    assert process_of(tmp_path, "sys.exit(7)").wait() == 7


WAITS = """
def stop(number, frame):
    (folder / "saved").write_text(str(number)); status(state="interrupted", exit_code=75); sys.exit(75)
signal.signal(signal.SIGTERM, stop)
(folder / "ready").touch()
time.sleep(60)
"""


def stop_when_ready(tmp_path):
    def look():
        while not (tmp_path / "ready").exists():
            threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, daemon=True).start()


def test_a_signal_is_passed_on_and_the_checkpoint_waited_for(tmp_path):
    process = process_of(tmp_path, WAITS)
    before = signal.getsignal(signal.SIGTERM)
    stop_when_ready(tmp_path)
    assert process.wait() == 75 and process.told == signal.SIGTERM
    assert (tmp_path / "saved").read_text() == str(int(signal.SIGTERM)) and signal.getsignal(signal.SIGTERM) == before


def test_a_launcher_around_the_pipeline_is_refused(monkeypatch):
    assert refuse_a_launcher() is None
    monkeypatch.setenv("RANK", "0")
    assert "--launcher" in refuse_a_launcher()
