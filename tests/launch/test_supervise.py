import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from cpt.errors import LaunchError
from cpt.launch.supervise import Decision, Ended, Supervisor, next_move, supervise_run
from cpt.recipe.schema import Recipe
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


@contextmanager
def held_by_another(folder: Path):
    """The run's lock, in a process of its own."""
    folder.mkdir(exist_ok=True)
    program = (
        "import sys; from pathlib import Path; from cpt.runs.record import hold; kept = hold(Path(sys.argv[1]));"
        " print(); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    other.stdout.readline()
    try:
        yield other
    finally:
        other.kill()
        other.wait()


def recipe(folder):
    model, data = {"path": "some/model"}, {"sources": [{"path": "a.txt"}]}
    return Recipe.model_validate(
        {"name": "a-run", "output_dir": folder, "model": model, "data": data, "budget": {"tokens": 1000}}
    )


def test_a_run_that_dies_is_restarted_until_it_is_done(tmp_path):
    body = """
        if tries < 2: os.kill(os.getpid(), 9)
        status(state="finished", exit_code=0)
    """
    assert supervised(tmp_path, body).supervise().what == "done"
    assert len(list(tmp_path.glob("try-*"))) == 3
    assert [event["kind"] for event in read_events(tmp_path)] == ["restart", "restart"]


@pytest.mark.slow
def test_a_hung_process_writes_its_stacks_and_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("cpt.launch.supervise.LEAST_PATIENCE", 1.0)
    monkeypatch.setattr("cpt.launch.supervise.SECONDS_FOR_STACKS", 0.3)
    body = """
        import signal, socket
        signal.signal(signal.SIGUSR2, lambda *_: (folder / "asked").touch())
        (folder / "heartbeats").mkdir(exist_ok=True)
        if tries == 0:
            sign = dict(rank=0, pid=os.getpid(), host=socket.gethostname(), phase="training", step=4, beats=9, seconds_per_step=0.1)
            (folder / "heartbeats" / "rank-0.json").write_text(json.dumps(sign))
            time.sleep(60)
            time.sleep(60)
        status(state="finished", exit_code=0)
    """  # noqa: E501
    began = time.monotonic()
    assert supervised(tmp_path, body).supervise().what == "done"
    assert time.monotonic() - began < 20 and (tmp_path / "asked").exists()
    assert [event["kind"] for event in read_events(tmp_path)] == ["hang", "restart"]


def test_a_signal_is_forwarded_and_ends_the_supervision(tmp_path):
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


@pytest.mark.slow
def test_running_out_of_memory_is_no_failure(tmp_path):
    body = """
        if tries < 4:  # the same step more often than a failure may
            event = {"kind": "out_of_memory", "restart": True, "message": f"step {tries}"}
            with (folder / "events.jsonl").open("a") as events:
                events.write(json.dumps(event) + chr(10))
            os.kill(os.getpid(), 9)
        status(state="finished", exit_code=0)
    """
    assert supervised(tmp_path, body, restarts=2).supervise().what == "done"


@pytest.mark.slow
def test_processes_that_a_killed_launcher_left_are_killed_before_the_restart(tmp_path):
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


@pytest.mark.slow
def test_a_lost_host_is_named_where_a_library_ended_the_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("cpt.launch.supervise.SECONDS_TO_BE_GONE", 0.5)
    body = """
        import signal, socket
        (folder / "heartbeats").mkdir(exist_ok=True)
        if tries == 1:
            status(state="finished", exit_code=0)
            sys.exit()
        for pulse in range(15):
            for rank, host in enumerate((socket.gethostname(), "host-9")):
                sign = dict(rank=rank, pid=1 if rank else os.getpid(), host=host, phase="training", step=4, beats=9, seconds_per_step=9.9)
                sign["pulse"] = 0 if rank else pulse
                (folder / "heartbeats" / f"rank-{rank}.json").write_text(json.dumps(sign))
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGABRT)  # as NCCL's watchdog does
    """  # noqa: E501
    assert supervised(tmp_path, body).supervise().what == "done"
    assert "host-9 (process 1) has no heartbeat any more" in read_events(tmp_path)[0]["message"]


def test_a_launcher_survives_the_signal_of_a_scheduler_to_its_whole_session(tmp_path):
    body = """
        import signal
        os.kill(os.getpid(), signal.SIGUSR1)
        status(state="finished", exit_code=0)
    """
    assert supervised(tmp_path, body, restarts=None).supervise().what == "done"


def ended(step=5, *, state="running", error=None, own_code=None, code=-9, hung=False, at=0.0):
    return Ended(code, state, error, own_code, "why", step, hung, at)


@pytest.mark.parametrize(
    ("last", "supervised", "once"),
    [
        (ended(state="finished", code=1), ("done", 0), ("done", 0)),  # a launcher that fails after the run is done
        (ended(code=0), ("done", 0), ("done", 0)),
        (ended(state="interrupted", error="Interrupted", own_code=75), ("stop", 75), ("stop", 75)),
        (ended(state="interrupted", error="RestartNeeded", own_code=75), ("again", 0), ("again", 0)),
        (ended(state="failed", error="RecipeError", own_code=2), ("give up", 2), ("give up", 2)),
        (ended(state="failed", error="LaunchError", own_code=2), ("again", 0), ("give up", 2)),
        (ended(state="failed", error="ValueError", own_code=1), ("again", 0), ("give up", 1)),
        (ended(), ("again", 0), ("give up", 1)),
        (ended(hung=True), ("again", 0), ("give up", 1)),
    ],
)
def test_the_end_of_an_attempt_decides_with_and_without_supervise(last, supervised, once):
    for restarts, expected in ((3, supervised), (None, once)):
        decision = next_move([last], restarts=restarts)
        assert (decision.what, decision.code) == expected


def test_three_failures_at_one_step_are_enough():
    assert next_move([ended(5), ended(5)], restarts=10).what == "again"
    decision = next_move([ended(5), ended(9), ended(5), ended(5)], restarts=10)
    assert (decision.what, decision.code) == ("give up", 1)


def test_restarts_are_counted_in_an_hour():
    assert next_move([ended(step, at=step) for step in range(4)], restarts=3).what == "give up"
    assert next_move([ended(step, at=3000.0 * step) for step in range(4)], restarts=3).what == "again"


def test_supervisors_of_several_hosts_share_one_run(tmp_path, monkeypatch):
    launcher = "torchrun --nnodes=2 --node_rank 1"
    with pytest.raises(LaunchError, match="name=..."):
        supervise_run(recipe(tmp_path), [], new=True, launcher=launcher)
    monkeypatch.setattr("cpt.launch.supervise.Supervisor.supervise", lambda self: Decision("done"))
    with held_by_another(tmp_path / "a-run"), pytest.raises(LaunchError, match="trained already"):
        supervise_run(recipe(tmp_path), [])
    with held_by_another(tmp_path / "a-run") as other:  # another host's supervisor looks at the folder
        threading.Timer(0.5, other.kill).start()
        supervise_run(recipe(tmp_path), [], launcher=launcher)
