"""Real processes that stand in for runs."""

import sys

from benchmarks.gpu import processes
from benchmarks.gpu.cases import CASES
from benchmarks.gpu.processes import begin, run_apart

NEEDS_FOUR = """
import json, sys
sys.stdin.readline()
out, parts = sys.argv[1], int(sys.argv[2])
json.dump({"parts": parts, **({} if parts >= 4 else {"failed": "out of memory"})}, open(out, "w"))
"""


def stand_in(monkeypatch, code):
    monkeypatch.setattr(
        processes, "words_of", lambda case, system, folder, out, parts, gib: [sys.executable, "-c", code, str(out), str(parts)]
    )


def run(case, system, folder, seconds=100):
    return run_apart(begin(CASES[case], system, folder), CASES[case], system, seconds)


def test_a_micro_batch_without_room_is_halved_until_it_has(monkeypatch, tmp_path):
    stand_in(monkeypatch, NEEDS_FOUR)
    assert run("B", "trainer", tmp_path) == {"parts": 4}
    assert run("H", "cpt", tmp_path) == {"parts": 1, "failed": "out of memory"}, "gradients that are dropped cannot add up"


def test_a_process_that_dies_or_hangs_is_a_result_too(monkeypatch, tmp_path):
    stand_in(monkeypatch, "raise RuntimeError('no such kernel')")
    about = {"case": "A", "system": "cpt", "parts": 1, "gib": None}
    assert run("A", "cpt", tmp_path) == {**about, "failed": "exit code 1: RuntimeError: no such kernel"}
    stand_in(monkeypatch, "import time; time.sleep(60)")
    assert run("A", "cpt", tmp_path, seconds=1) == {**about, "failed": "took longer than 1 seconds"}


def test_a_process_waits_for_its_turn(monkeypatch, tmp_path):
    stand_in(monkeypatch, NEEDS_FOUR)
    started = begin(CASES["G"], "cpt", tmp_path, parts=4)
    assert started.process.poll() is None and not started.out.exists()
    assert run_apart(started, CASES["G"], "cpt", 100) == {"parts": 4}
    other = begin(CASES["G"], "cpt", tmp_path)
    other.stop()
    assert other.process.returncode == -9
