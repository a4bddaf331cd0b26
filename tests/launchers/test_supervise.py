import signal
import subprocess
import sys
import textwrap
import threading
import time

from cpt.launchers.supervise import Supervisor
from cpt.runs.events import read_events
from cpt.runs.record import Run

RUN = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
tries = len(list(folder.glob("try-*")))
(folder / f"try-{tries}").touch()
def status(**s): (folder / "status.json").write_text(json.dumps({"updated": f"{tries}-{time.time()}", **s}))
status(state="running")
"""


def supervised(tmp_path, body, **options):
    """A stand-in for a run, whose `tries` is the number of earlier attempts."""
    program = tmp_path / "run.py"
    program.write_text(RUN + textwrap.dedent(body))
    return Supervisor(Run(tmp_path), [sys.executable, str(program), str(tmp_path)], **options)


def test_a_run_that_dies_is_started_again_until_it_is_done(tmp_path):
    body = """
        if tries < 2: os.kill(os.getpid(), 9)
        status(state="finished", exit_code=0)
    """
    assert supervised(tmp_path, body).supervise().what == "done"
    assert len(list(tmp_path.glob("try-*"))) == 3
    assert [event["kind"] for event in read_events(tmp_path)] == ["restart", "restart"]


def test_a_mistake_of_the_user_is_not_tried_again(tmp_path):
    body = """
        status(state="failed", error="RecipeError", exit_code=2, message="no such key")
        sys.exit(2)
    """
    decision = supervised(tmp_path, body).supervise()
    assert (decision.what, decision.code) == ("give up", 2) and len(list(tmp_path.glob("try-*"))) == 1


def test_a_process_that_stands_still_is_ended_with_its_stacks_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("cpt.launchers.watch.LEAST_PATIENCE", 1.0)
    monkeypatch.setattr("cpt.launchers.supervise.SECONDS_FOR_STACKS", 0.3)
    body = """
        import signal, dataclasses
        signal.signal(signal.SIGUSR2, lambda *_: (folder / "asked").touch())
        (folder / "heartbeats").mkdir(exist_ok=True)
        if tries == 0:
            sign = dict(rank=0, pid=os.getpid(), host="h", phase="training", step=4, beats=9, seconds_per_step=0.1)
            (folder / "heartbeats" / "rank-0.json").write_text(json.dumps(sign))
            time.sleep(60)
            time.sleep(60)
        status(state="finished", exit_code=0)
    """
    began = time.monotonic()
    assert supervised(tmp_path, body).supervise().what == "done"
    assert time.monotonic() - began < 20 and (tmp_path / "asked").exists()
    assert [event["kind"] for event in read_events(tmp_path)] == ["hang", "restart"]


def test_a_signal_is_passed_on_and_ends_the_supervision(tmp_path):
    body = """
        import signal
        def stop(*_):
            status(state="interrupted", error="Interrupted", exit_code=75, message="stopped by SIGTERM")
            sys.exit(75)
        signal.signal(signal.SIGTERM, stop)
        (folder / "ready").touch()
        time.sleep(60)
    """
    supervisor = supervised(tmp_path, body)

    def send():
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)
        signal.raise_signal(signal.SIGTERM)

    sender = threading.Timer(0, send)
    sender.start()
    decision = supervisor.supervise()
    assert (decision.what, decision.code) == ("stop", 75)


def test_running_out_of_memory_is_learned_from_and_no_failure(tmp_path):
    body = """
        if tries < 4:  # the same step more often than a failure may
            with (folder / "events.jsonl").open("a") as events:
                events.write(json.dumps({"kind": "out_of_memory", "restart": True, "message": "halved"}) + chr(10))
            os.kill(os.getpid(), 9)
        status(state="finished", exit_code=0)
    """
    assert supervised(tmp_path, body, restarts=2).supervise().what == "done"


def test_what_a_killed_launcher_leaves_behind_is_ended_before_the_next_start(tmp_path):
    body = """
        import subprocess
        if tries == 0:
            orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
            (folder / "orphan").write_text(str(orphan.pid))
            os.kill(os.getpid(), 9)
        status(state="finished", exit_code=0)
    """
    assert supervised(tmp_path, body).supervise().what == "done"
    pid = (tmp_path / "orphan").read_text()
    assert subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip() in ("", "Z")
