import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpt.data.store.parallel import map_in_order, num_workers
from cpt.errors import DataError, ResourceError

WORK = """
import os, signal, sys, time
from cpt.errors import DataError

def square(number):
    print("noise on stdout")
    time.sleep(0.05 * (number == 0))
    return number * number, os.getpid()

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

def die(number):
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number

def slow(number):
    time.sleep(60)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A user's module, importable here and in workers."""
    (tmp_path / "users_work.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("users_work")
    sys.modules.pop("users_work", None)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_results_come_in_the_order_of_the_arguments(work, workers):
    results = list(map_in_order(lambda: work.square, range(20), workers))
    assert [result for result, _ in results] == [number**2 for number in range(20)]
    assert (os.getpid() in {process for _, process in results}) == (workers == 0)


def test_the_first_failure_in_order_is_raised_and_what_is_before_it_is_given(work):
    given = []
    with pytest.raises(DataError, match="bad row in 2"):
        given.extend(map_in_order(lambda: work.fail_from_two_on, range(10), 2))
    assert given == [0, 1]


def test_an_exception_that_does_not_travel_keeps_its_words(work):
    with pytest.raises(RuntimeError, match="Own: own"):
        list(map_in_order(lambda: work.own_exception, [1], 1))


def test_a_killed_worker_is_a_resource_error(work):
    with pytest.raises(ResourceError, match="memory.*CPT_WORKERS=1"):
        list(map_in_order(lambda: work.die, range(4), 2))


def test_stopping_early_ends_the_workers(work):
    results = map_in_order(lambda: work.square, range(100), 2)
    process = next(results)[1]
    results.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_workers_end_with_a_parent_that_is_killed(work, tmp_path):
    """And a script without a main guard is not run again in its workers."""
    script = tmp_path / "script.py"
    script.write_text(
        "import users_work\nfrom cpt.data.store.parallel import map_in_order\n"
        "results = map_in_order(lambda: users_work.square, range(10_000), 2)\n"
        "for _ in range(5):\n    print(next(results)[1], flush=True)\n"
        "import time; time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    workers = {int(parent.stdout.readline()) for _ in range(5)}
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while workers := {worker for worker in workers if is_running(worker)}:
        assert time.monotonic() < deadline, f"{workers} are still there"
        time.sleep(0.05)


def is_running(process):
    """False for one that is gone, or gone and not yet fetched by its new parent."""
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    except OSError:
        return False


def test_the_number_of_workers_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("CPT_WORKERS", "3")
    assert num_workers() == 3
    monkeypatch.delenv("CPT_WORKERS")
    assert num_workers() >= 1
    monkeypatch.setenv("CPT_WORKERS", "many")
    with pytest.raises(ResourceError, match="CPT_WORKERS.*many"):
        num_workers()
