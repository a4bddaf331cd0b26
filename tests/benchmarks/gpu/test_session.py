"""The commands, without a GPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import processes, session
from benchmarks.gpu.processes import Job

ROOT = Path(__file__).parents[3]


def test_without_a_gpu_nothing_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["session", "1", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(session, "find_gpus", list)
    with pytest.raises(SystemExit, match="GPU"):
        session.main()
    assert not list(tmp_path.iterdir())


def test_runs_continue_until_the_time_is_over(monkeypatch, tmp_path, capsys):
    class Waiting:
        def __init__(self, job, folder):
            self.job = job

        def stop(self):
            stopped.append(self.job.system)

    def run(started, job, seconds):
        assert started.job == job
        clock["now"] += 50
        return {
            "case": job.case,
            "system": job.system,
            "gib": None,
            "tokens_per_second": 1.0,
            "parts": 1,
            "best": True,
        }

    clock, stopped = {"now": 0.0}, []
    monkeypatch.setattr(processes, "prepare_all", lambda *_: None)
    monkeypatch.setattr(processes, "begin", Waiting)
    monkeypatch.setattr(processes, "run_job", run)
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock["now"])
    processes.run_jobs(
        session.chosen(["A"], list(session.SYSTEMS)), tmp_path, end=130, limit=100, write=tmp_path / "gpu.jsonl"
    )
    assert [one["system"] for one in processes.read_lines(tmp_path / "gpu.jsonl")] == ["bare", "cpt", "trainer"]
    assert stopped == ["liger"] and "no time left for: A by liger, A by expert" in capsys.readouterr().out


def test_what_has_a_result_of_this_machine_does_not_run_again():
    there = {"case": "B", "system": "cpt", "gib": None, "dry_run": False, "parts": 1, "best": True, **processes.here()}
    assert processes.has_result([there], Job("B", "cpt")) and not processes.has_result(
        [there], Job("B", "cpt", parts=4)
    )
    assert not processes.has_result([there], Job("G", "cpt")) and not processes.has_result(
        [{**there, "failed": "x"}], Job("B", "cpt")
    )
    assert not processes.has_result([{**there, "device": "another"}], Job("B", "cpt"))


def test_a_session_takes_earlier_lines_and_continues_after_a_failure(monkeypatch, tmp_path):
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text('{"step": "tests", "name": "kernels", "code": 0, "summary": "44 passed", "failed_tests": []}\n')
    (tmp_path / "out").mkdir()
    one = session.Session(tmp_path / "out", time.monotonic() + 100, True, tmp_path)
    session.take_earlier([earlier, earlier], one)
    monkeypatch.setattr(session, "run_jobs", lambda jobs, *_, **__: one.add(step="jobs", name=str(jobs[0])))
    one.run([session.KERNELS, session.Module("no_such_module", 60), Job("F", "cpt")])
    lines = [json.loads(line) for line in one.results.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["kernels", "no_such_module", "F1 by cpt"], (
        "a card of less than 120 GiB takes one row"
    )


@pytest.mark.long
def test_a_dry_run_goes_through_every_system(tmp_path):
    words = [
        sys.executable,
        "-m",
        "benchmarks.gpu.session",
        "--dry-run",
        "--out",
        str(tmp_path),
        "--cases",
        "A",
        "D",
        "E",
    ]
    result = subprocess.run(
        words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=540
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert (
        result.stdout.count("tokens/s, 1 micro-batches") == 12
        and result.stdout.count("reached") == 5
        and "MISSED" not in result.stdout
    )
