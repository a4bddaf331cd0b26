import os
import socket
import subprocess
import threading
import time

import pytest

from cpt.errors import Interrupted, LaunchError
from cpt.runs.events import LastHeartbeat, read_events, write_heartbeat
from cpt.runs.record import Run
from cpt.training import liveness
from cpt.training.liveness import find_lost_ranks, lost_ranks_named

LOST = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
HERE = socket.gethostname()


def sign(rank, host, **changed):
    return LastHeartbeat(
        **{
            "rank": rank,
            "pid": 1,
            "host": host,
            "phase": "training",
            "step": 7,
            "beats": 4,
            "seconds_per_step": 2.0,
            **changed,
        }
    )


@pytest.fixture(autouse=True)
def four_processes(tmp_path, monkeypatch):
    """Two here, of which this one is the first; two on another host. They are there for half a second to answer."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(liveness, "SECONDS_FOR_AN_ANSWER", 0.5)
    for rank, host in enumerate((HERE, HERE, "host-9", "host-9")):
        write_heartbeat(tmp_path, sign(rank, host, pid=os.getpid()))


def answer(folder, *signs):
    """What the others write while one waits."""

    def write():
        time.sleep(0.1)
        for other in signs:
            write_heartbeat(folder, other)

    threading.Thread(target=write).start()


def message_of(folder):
    with pytest.raises(LaunchError) as told, lost_ranks_named(Run(folder)):
        raise LOST
    return str(told.value)


def test_a_host_that_gives_no_sign_of_life_is_named(tmp_path):
    answer(tmp_path, sign(1, HERE, pulse=1))
    message = message_of(tmp_path)
    assert (
        message.startswith("host-9 (process 2, 3) is gone")
        and "step 7" in message
        and "Nothing was saved yet" in message
    )
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["processes"], event["message"]) == ("lost", [2, 3], message)


def test_a_process_that_ended_with_an_error_of_its_own_is_the_cause(tmp_path):
    answer(
        tmp_path, sign(1, HERE, ended=""), sign(2, "host-9", ended="DataError: no rows"), sign(3, "host-9", ended="")
    )
    assert message_of(tmp_path).startswith("process 2 on host-9 ended with DataError: no rows.")


def test_where_all_are_there_the_librarys_words_stay(tmp_path):
    answer(tmp_path, *(sign(rank, host, pulse=1) for rank, host in ((1, HERE), (2, "host-9"), (3, "host-9"))))
    message = message_of(tmp_path)
    assert "ddp_timeout" in message and "Connection closed by peer" in message


def test_a_process_that_a_signal_stopped_outside_of_the_training_interrupts_the_others(tmp_path):
    answer(
        tmp_path, sign(1, HERE, ended="Interrupted: SIGTERM"), sign(2, "host-9", ended=""), sign(3, "host-9", ended="")
    )
    with pytest.raises(Interrupted), lost_ranks_named(Run(tmp_path)):
        raise LOST


def test_a_process_of_this_host_that_died_is_known_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(liveness, "SECONDS_FOR_AN_ANSWER", 60.0)
    dead = subprocess.Popen(["true"])
    dead.wait()
    write_heartbeat(tmp_path, sign(1, HERE, pid=dead.pid))
    answer(tmp_path, sign(2, "host-9", pulse=1), sign(3, "host-9", pulse=1))
    gone, _ = find_lost_ranks(tmp_path)
    assert [sign.rank for sign in gone] == [1]


def test_the_first_one_left_says_how_the_run_stands_where_the_main_process_cannot(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    write_heartbeat(tmp_path, sign(0, "host-8"))
    write_heartbeat(tmp_path, sign(1, "host-8"))
    answer(tmp_path, sign(3, "host-9", pulse=1))
    message = message_of(tmp_path)
    status = Run(tmp_path).status()
    assert message.startswith("host-8 (process 0, 1) is gone")
    assert (status["state"], status["error"], status["message"], status["exit_code"]) == (
        "failed",
        "LaunchError",
        message,
        2,
    )


def test_other_errors_and_other_worlds_pass(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="shapes"), lost_ranks_named(Run(tmp_path)):
        raise RuntimeError("shapes")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(RuntimeError, match="Connection closed"), lost_ranks_named(Run(tmp_path)):
        raise LOST
    assert read_events(tmp_path) == []
