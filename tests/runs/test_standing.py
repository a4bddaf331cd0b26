import json
import os
import socket
import subprocess
import sys

import pytest

from cpt.runs.standing import read_status


@pytest.fixture
def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def state_of(folder, *, pid, lock=None, state="running"):
    (folder / "status.json").write_text(json.dumps({"state": state, "pid": pid}))
    if lock is not None:
        (folder / ".lock").write_text(lock)
    return read_status(folder).get("state")


def test_a_run_whose_process_lives_is_running(tmp_path):
    assert state_of(tmp_path, pid=os.getpid(), lock=f"process {os.getpid()} on {socket.gethostname()}") == "running"


def test_a_run_whose_process_is_gone_died(tmp_path, dead_pid):
    assert state_of(tmp_path, pid=dead_pid) == "died"
    assert state_of(tmp_path, pid=os.getpid(), lock=f"process {dead_pid} on {socket.gethostname()}") == "died"


def test_of_another_host_nothing_is_known(tmp_path, dead_pid):
    assert state_of(tmp_path, pid=dead_pid, lock=f"process {dead_pid} on elsewhere") == "running"


def test_what_ended_stays_as_it_ended(tmp_path, dead_pid):
    assert state_of(tmp_path, pid=dead_pid, state="failed") == "failed"


@pytest.mark.parametrize("pid", [None, "x", 10**30, -5, True])
def test_rubbish_is_survived(tmp_path, pid):
    assert state_of(tmp_path, pid=pid, lock="rubbish") in ("running", "died")
    (tmp_path / "status.json").write_text("{")
    assert read_status(tmp_path) == {}


def test_a_process_of_another_user_is_alive(tmp_path, monkeypatch):
    def not_yours(pid, number):
        raise PermissionError

    monkeypatch.setattr("os.kill", not_yours)
    assert state_of(tmp_path, pid=12345) == "running"
