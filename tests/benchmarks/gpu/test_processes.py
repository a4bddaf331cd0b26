"""Real processes in place of runs."""

import sys

from benchmarks.gpu import processes
from benchmarks.gpu.processes import Job, begin, run_job

NEEDS_FOUR = """
import json, sys
sys.stdin.readline()
out, parts = sys.argv[1], int(sys.argv[2])
json.dump({"parts": parts, **({} if parts >= 4 else {"failed": "out of memory"})}, open(out, "w"))
"""


def replace_runs(monkeypatch, code):
    monkeypatch.setattr(
        processes, "words_of", lambda job, parts, folder, out: [sys.executable, "-c", code, str(out), str(parts)]
    )


def run(job, folder, seconds=100):
    return run_job(begin(job, folder), job, seconds)


def test_a_micro_batch_is_halved_until_it_fits(monkeypatch, tmp_path):
    replace_runs(monkeypatch, NEEDS_FOUR)
    assert run(Job("B", "expert"), tmp_path) == {"parts": 4, "best": True}
    assert run(Job("B", "expert", parts=2), tmp_path) == {"parts": 2, "failed": "out of memory", "best": False}
    assert run(Job("H", "cpt"), tmp_path)["failed"] == "out of memory", "released gradients cannot be accumulated"


def test_a_process_that_dies_or_hangs_is_a_result_too(monkeypatch, tmp_path):
    replace_runs(monkeypatch, "raise RuntimeError('no such kernel')")
    assert run(Job("A", "cpt"), tmp_path)["failed"] == "exit code 1: RuntimeError: no such kernel"
    replace_runs(monkeypatch, "import time; time.sleep(60)")
    assert run(Job("A", "cpt"), tmp_path, seconds=1)["failed"] == "took longer than 1 seconds"


def test_a_process_waits_for_its_turn(monkeypatch, tmp_path):
    replace_runs(monkeypatch, NEEDS_FOUR)
    started = begin(Job("G", "cpt", parts=4), tmp_path)
    assert started.process.poll() is None and not started.out.exists()
    started.stop()
    assert started.process.returncode == -9
