"""Restarts and watching of a run, with small programs in the place of the run."""

import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cpt.errors import LaunchError
from cpt.launch.supervise import (
    Ended,
    RestartDecision,
    RunWatch,
    Supervisor,
    names_several_hosts,
    next_move,
    refuse_more_than_the_machine_holds,
    supervise_run,
)
from cpt.recipe.schema import Recipe
from cpt.runs.events import LastHeartbeat, read_events, write_heartbeat
from cpt.runs.record import Run

# `tries` is the number of earlier attempts.
RUN = """
import json, os, pathlib, signal, socket, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
tries = len(list(folder.glob("try-*")))
(folder / f"try-{tries}").touch()
def status(**s): (folder / "status.json").write_text(json.dumps({"updated": f"{tries}-{time.time()}", **s}))
def beat(**changed):
    usual = dict(rank=0, pid=os.getpid(), host=socket.gethostname(), phase="training", step=4, beats=9)
    last = {**usual, "seconds_per_step": 0.1, **changed}
    (folder / "heartbeats").mkdir(exist_ok=True)
    (folder / "heartbeats" / f"rank-{last['rank']}.json").write_text(json.dumps(last))
def finish():
    status(state="finished", exit_code=0)
    sys.exit()
status(state="running")
"""


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    """Supervise a program; returns the decision at its end."""
    monkeypatch.setattr("cpt.launch.supervise.FIRST_WAIT", 0.01)
    monkeypatch.setattr("cpt.launch.supervise.SECONDS_BETWEEN_LOOKS", 0.05)

    def run(body: str, **options) -> RestartDecision:
        program = tmp_path / "run.py"
        program.write_text(RUN + textwrap.dedent(body))
        return Supervisor(
            Run(tmp_path), [sys.executable, str(program), str(tmp_path)], **options
        ).supervise()

    return run


def kinds_of_events(folder: Path) -> list[str]:
    return [event["kind"] for event in read_events(folder)]


@pytest.mark.heavy
def test_a_hung_process_writes_its_stacks_and_is_killed(supervised, tmp_path, monkeypatch):
    monkeypatch.setattr("cpt.launch.supervise.LEAST_PATIENCE", 1.0)
    monkeypatch.setattr("cpt.launch.supervise.SECONDS_FOR_STACKS", 0.3)
    body = """
        signal.signal(signal.SIGUSR2, lambda *_: (folder / "asked").touch())
        if tries == 0:
            beat()
            time.sleep(600)
        finish()
    """
    assert supervised(body).action == "done"
    assert (tmp_path / "asked").exists() and kinds_of_events(tmp_path) == ["hang", "restart"]


@pytest.mark.heavy
def test_a_signal_is_forwarded_and_ends_the_supervision(supervised, tmp_path):
    body = """
        def stop(*_):
            status(state="interrupted", error="Interrupted", exit_code=75, message="stopped by SIGTERM")
            sys.exit(75)
        signal.signal(signal.SIGTERM, stop)
        (folder / "ready").touch()
        time.sleep(60)
    """

    def send_when_ready():
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)
        signal.raise_signal(signal.SIGTERM)

    threading.Timer(0, send_when_ready).start()
    decision = supervised(body)
    assert (decision.action, decision.code) == ("stop", 75)


@pytest.mark.heavy
def test_running_out_of_memory_does_not_count_as_a_failure(supervised):
    body = """
        if tries < 4:  # the same step more often than a failure may
            event = {"kind": "out_of_memory", "restart": True, "message": f"step {tries}"}
            with (folder / "events.jsonl").open("a") as events:
                events.write(json.dumps(event) + chr(10))
            os.kill(os.getpid(), 9)
        finish()
    """
    assert supervised(body, restarts=2).action == "done"


@pytest.mark.heavy
def test_a_launcher_survives_a_schedulers_signal_to_its_whole_session(supervised):
    assert (
        supervised("os.kill(os.getpid(), signal.SIGUSR1); finish()", restarts=None).action == "done"
    )


def ended(step=5, *, state="running", error=None, own_code=None, code=-9, hung=False, at=0.0):
    return Ended(code, state, error, own_code, "why", step, hung, at)


@pytest.mark.parametrize(
    ("last", "supervising", "once"),
    [
        (
            ended(state="finished", code=1),
            ("done", 0),
            ("done", 0),
        ),  # a launcher that fails after the run is done
        (ended(code=0), ("done", 0), ("done", 0)),
        (ended(state="interrupted", error="Interrupted", own_code=75), ("stop", 75), ("stop", 75)),
        (
            ended(state="interrupted", error="RestartNeeded", own_code=75),
            ("again", 0),
            ("again", 0),
        ),
        (ended(state="failed", error="RecipeError", own_code=2), ("give up", 2), ("give up", 2)),
        (ended(state="failed", error="LaunchError", own_code=2), ("again", 0), ("give up", 2)),
        (ended(state="failed", error="ValueError", own_code=1), ("again", 0), ("give up", 1)),
        (ended(), ("again", 0), ("give up", 1)),
        (ended(hung=True), ("again", 0), ("give up", 1)),
    ],
)
def test_the_end_of_an_attempt_decides_with_and_without_supervise(last, supervising, once):
    for restarts, expected in ((3, supervising), (None, once)):
        decision = next_move([last], restarts=restarts)
        assert (decision.action, decision.code) == expected


def test_a_restart_for_the_same_reason_is_given_up_after_three():
    asks = ended(state="interrupted", error="RestartNeeded", own_code=76)
    other = replace(asks, message="another reason")
    assert next_move([asks] * 3, restarts=10).action == "again"
    assert next_move([asks, asks, other, asks, asks], restarts=10).action == "again"
    decision = next_move([asks] * 4, restarts=10)
    assert (decision.action, decision.code) == ("give up", 76)


def test_three_failures_at_one_step_are_enough():
    assert next_move([ended(5), ended(5)], restarts=10).action == "again"
    decision = next_move([ended(5), ended(9), ended(5), ended(5)], restarts=10)
    assert (decision.action, decision.code) == ("give up", 1)


def test_restarts_are_counted_in_an_hour():
    assert next_move([ended(step, at=step) for step in range(4)], restarts=3).action == "give up"
    assert (
        next_move([ended(step, at=3000.0 * step) for step in range(4)], restarts=3).action
        == "again"
    )


def recipe(folder: Path) -> Recipe:
    model, data = {"path": "some/model"}, {"sources": [{"path": "a.txt"}]}
    return Recipe.model_validate(
        {
            "name": "a-run",
            "output_dir": folder,
            "model": model,
            "data": data,
            "budget": {"tokens": 1000},
        }
    )


@pytest.mark.heavy
def test_supervisors_of_several_hosts_share_one_run(tmp_path, monkeypatch):
    launcher, folder = "torchrun --nnodes=2 --node_rank 1", tmp_path / "a-run"
    with pytest.raises(LaunchError, match="name=..."):
        supervise_run(recipe(tmp_path), [], check=lambda folder: False, new=True, launcher=launcher)
    monkeypatch.setattr(
        "cpt.launch.supervise.Supervisor.supervise", lambda self: RestartDecision("done")
    )
    folder.mkdir()
    holds = f"from pathlib import Path; from cpt.runs.record import lock_run; kept = lock_run(Path({str(folder)!r}))"
    words = [sys.executable, "-c", f"{holds}; print(flush=True); input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        with pytest.raises(LaunchError):
            supervise_run(recipe(tmp_path), [], check=lambda folder: False)
        threading.Timer(
            0.5, other.kill
        ).start()  # another host's supervisor only looks at the folder
        supervise_run(recipe(tmp_path), [], check=lambda folder: False, launcher=launcher)


@pytest.mark.parametrize(
    ("launcher", "several"),
    [
        ("torchrun --nnodes 2 --node_rank 1", True),
        ("torchrun --nnodes=1:4 --rdzv_endpoint a:1", True),
        ("accelerate launch --num_machines=2", True),
        ("deepspeed --hostfile h --no_ssh --node_rank 1", True),
        ("deepspeed --hostfile h", False),
        ("torchrun --nnodes=1 --nproc_per_node 8", False),
    ],
)
def test_a_launcher_that_starts_one_of_several_hosts_is_recognized(launcher, several):
    assert names_several_hosts(launcher) is several


def test_more_processes_than_the_machine_can_run_are_refused(monkeypatch):
    monkeypatch.setattr("cpt.launch.supervise.count_cpu_cores", lambda: 2)
    monkeypatch.setattr("cpt.launch.supervise.find_gpus", list)
    refuse_more_than_the_machine_holds(8, on_gpus=True)
    with pytest.raises(LaunchError, match="--processes 9"):
        refuse_more_than_the_machine_holds(9, on_gpus=True)
    monkeypatch.setattr("cpt.launch.supervise.find_gpus", lambda: ["one", "other"])
    with pytest.raises(LaunchError, match="--processes 3"):
        refuse_more_than_the_machine_holds(3, on_gpus=True)
    refuse_more_than_the_machine_holds(3, on_gpus=False)


# --- heartbeats ---------------------------------------------------------------------------------------------------


def heartbeat(**changed):
    usual = LastHeartbeat(
        rank=0, pid=1, host="h", phase="training", step=3, beats=4, seconds_per_step=2.0
    )
    return replace(usual, **changed)


def test_a_process_without_progress_is_found_by_this_clock(tmp_path):
    watch = RunWatch(tmp_path)
    write_heartbeat(tmp_path, heartbeat())
    write_heartbeat(tmp_path, heartbeat(rank=1))
    assert watch.hung(0) is None
    write_heartbeat(tmp_path, heartbeat(beats=5))
    assert watch.hung(25) is None
    found = watch.hung(31)
    assert found is not None and found.rank == 1, "rank 0 beat at 25"


def test_where_one_process_works_while_a_run_starts_the_others_may_wait_for_it(tmp_path):
    watch, hour = RunWatch(tmp_path), 3600
    for rank in (0, 1):
        write_heartbeat(tmp_path, heartbeat(rank=rank, phase="starting"))
    assert watch.hung(0) is None
    write_heartbeat(tmp_path, heartbeat(rank=0, phase="starting", beats=5))
    assert watch.hung(0.9 * hour) is None and watch.hung(1.8 * hour) is None
    assert watch.hung(2 * hour) is not None, "now nobody works"


def test_a_finished_run_that_is_being_evaluated_is_not_ended(tmp_path):
    watch = RunWatch(tmp_path)
    write_heartbeat(tmp_path, heartbeat(phase="ending"))
    (tmp_path / "status.json").write_text('{"state": "finished"}')
    assert watch.hung(0) is None and watch.hung(100_000) is None
    (tmp_path / "status.json").write_text('{"state": "running"}')
    assert watch.hung(100_001) is not None


def test_each_host_watches_its_own_processes_and_a_login_node_watches_all(tmp_path):
    watch = RunWatch(tmp_path)
    write_heartbeat(tmp_path, heartbeat(rank=1, host="another"))
    assert watch.hung(0) is None and watch.hung(31) is not None, "nobody here"
    write_heartbeat(tmp_path, heartbeat(rank=0, host=socket.gethostname()))
    assert watch.hung(32) is None and watch.hung(63).rank == 0


def test_a_process_that_waits_is_not_gone_and_one_without_a_pulse_is(tmp_path):
    watch = RunWatch(tmp_path)
    for rank in range(3):
        write_heartbeat(tmp_path, heartbeat(rank=rank, host=f"host-{rank}"))
    watch.hung(0)
    write_heartbeat(tmp_path, heartbeat(rank=0, host="host-0", pulse=1))
    write_heartbeat(tmp_path, heartbeat(rank=2, host="host-2", ended=""))
    watch.hung(11)
    assert [gone.host for gone in watch.gone(12)] == ["host-1"]
