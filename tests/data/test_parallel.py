"""Work in several processes, and a folder that several processes fill."""

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpt.cache import publish_once
from cpt.data.store.parallel import (
    POOL_BYTES,
    map_in_order,
    num_workers,
    shared_workers,
    workers_for,
)
from cpt.data.store.tokenized import WORKERS_IMPORT
from cpt.errors import DataError, ResourceError

WORK = """
import os, signal, sys, time
from cpt.data.store.tokenization import encode_by_gigatoken
from cpt.errors import DataError

def square(number):
    print("noise on stdout")
    time.sleep(0.05 * (number == 0))
    return number * number, os.getpid()

def ignores_ctrl_c(number):
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])

def fail_from_two_on(number):
    time.sleep(0.3 * (number == 2))
    if number >= 2:
        raise DataError(f"bad row in {number}")
    return number

class Own(Exception):
    def __init__(self, one, two):
        super().__init__("own")

def own_exception(number):
    raise Own(1, 2)

def modules_after_encoding(model):
    encode_by_gigatoken(model, ["a word"])
    return set(sys.modules)

def die(number):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A user's module, importable here and in workers."""
    (tmp_path / "users_work.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("users_work")
    sys.modules.pop("users_work", None)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.heavy)])
def test_results_come_in_the_order_of_the_arguments(work, workers):
    results = list(map_in_order(lambda: work.square, range(20), workers))
    assert [result for result, _ in results] == [number**2 for number in range(20)]
    assert (os.getpid() in {process for _, process in results}) == (workers == 0)


@pytest.mark.heavy
def test_the_first_failure_in_order_is_raised_after_the_results_before_it(work):
    given = []
    with pytest.raises(DataError, match="bad row in 2"):
        given.extend(map_in_order(lambda: work.fail_from_two_on, range(10), 2))
    assert given == [0, 1]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("function", "error", "words"),
    [("own_exception", RuntimeError, "Own: own"), ("die", ResourceError, "memory.*CPT_WORKERS=1")],
)
def test_an_exception_that_cannot_be_pickled_and_a_killed_worker_are_errors(
    work, function, error, words
):
    with pytest.raises(error, match=words):
        list(map_in_order(lambda: getattr(work, function), [1], 1))


@pytest.mark.heavy
def test_workers_leave_ctrl_c_to_the_process_that_started_them(work):
    assert list(map_in_order(lambda: work.ignores_ctrl_c, [1], 1)) == [True]


@pytest.mark.heavy
def test_stopping_early_ends_the_workers(work):
    results = map_in_order(lambda: work.square, range(100), 2)
    process = next(results)[1]
    results.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.heavy
def test_successive_calls_use_the_same_workers_until_the_block_ends(work):
    with shared_workers():
        calls = [dict(map_in_order(lambda: work.square, [1], 1)) for _ in range(2)]
        assert calls[0] == calls[1]
    with pytest.raises(ProcessLookupError):
        os.kill(calls[0][1], 0)


@pytest.mark.heavy
def test_workers_import_neither_torch_nor_what_else_is_slow(work, tokenizer):
    model = tokenizer.backend_tokenizer.to_str()
    (modules,) = map_in_order(lambda: work.modules_after_encoding, [model], 1, WORKERS_IMPORT)
    slow = {"torch", "transformers", "datasets", "awkward", "huggingface_hub", "rich"}
    assert "cpt.data.store.shards" in modules
    assert sorted(slow & modules) == []


SCRIPT = """
import time, users_work
from cpt.data.store.parallel import map_in_order
results = map_in_order(lambda: users_work.square, range(10_000), 2)
for _ in range(5):
    print(next(results)[1], flush=True)
time.sleep(60)
"""


@pytest.mark.heavy
def test_workers_end_with_a_parent_that_is_killed(work, tmp_path):
    """And a script without a main guard is not run again in its workers."""
    (tmp_path / "script.py").write_text(SCRIPT)
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], stdout=subprocess.PIPE, text=True
    )
    workers = {int(parent.stdout.readline()) for _ in range(5)}
    parent.kill()
    parent.wait()
    while workers := {worker for worker in workers if is_running(worker)}:
        time.sleep(0.05)


def is_running(process):
    """False for one that is gone, or gone and not yet fetched by its new parent."""
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    except OSError:
        return False


def test_the_number_of_workers_can_be_set(monkeypatch):
    monkeypatch.setenv("CPT_WORKERS", "3")
    assert num_workers() == 3
    monkeypatch.delenv("CPT_WORKERS")
    assert num_workers() >= 1
    monkeypatch.setenv("CPT_WORKERS", "many")
    with pytest.raises(ResourceError, match="CPT_WORKERS.*many"):
        num_workers()


def test_small_work_and_a_single_job_need_no_workers(monkeypatch):
    monkeypatch.setenv("CPT_WORKERS", "3")
    assert [workers_for(num_bytes, 2) for num_bytes in (POOL_BYTES - 1, POOL_BYTES)] == [0, 3]
    assert [workers_for(POOL_BYTES, jobs) for jobs in (0, 1, 2)] == [0, 0, 3]


# A folder that is filled once


def folders(root):
    return [path.name for path in root.iterdir() if path.is_dir()]


def test_without_locks_two_machines_fill_a_folder_each_and_the_first_stays(tmp_path, monkeypatch):
    """As on a file system whose locks do not reach other machines, or that has none."""

    def no_lock(*_):
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(fcntl, "flock", no_lock)

    def slow(folder):
        (folder / "content").write_text("first half, ")
        monkeypatch.setattr("cpt.cache.socket.gethostname", lambda: "other")
        publish_once(
            tmp_path / "a", lambda other: (other / "content").write_text("all of the other")
        )
        with (folder / "content").open("a") as file:
            file.write("second half")

    publish_once(tmp_path / "a", slow)
    assert (tmp_path / "a" / "content").read_text() == "all of the other" and folders(tmp_path) == [
        "a"
    ]
