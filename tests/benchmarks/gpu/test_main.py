"""The commands, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.cases import CASES
from benchmarks.gpu.run import machine

ROOT = Path(__file__).parents[3]


def test_without_a_gpu_nothing_is_run(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gpu", "--write", str(tmp_path / "gpu.jsonl")])
    monkeypatch.setattr(command, "find_gpus", list)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        command.main()
    assert not list(tmp_path.iterdir())


def test_runs_go_on_until_the_time_is_over(monkeypatch, tmp_path, capsys):
    begun, stopped = [], []

    class Waiting:
        def __init__(self, case, system, folder, gib):
            begun.append(system)
            self.system = system

        def stop(self):
            stopped.append(self.system)

    def run(started, case, system, seconds, gib):
        assert started.system == system and begun[-1] != system, "the next one imports meanwhile"
        clock["now"] += 50
        return {"case": case.name, "system": system, "gib": gib, "tokens_per_second": 1.0}

    clock = {"now": 0.0}
    monkeypatch.setattr(command, "begin", Waiting)
    monkeypatch.setattr(command, "run_apart", run)
    monkeypatch.setattr(command.time, "monotonic", lambda: clock["now"])
    runs = [(CASES["A"], system) for system in CASES["A"].systems]
    command.run_all(runs, tmp_path, end=130, limit=100, gib=None, write=tmp_path / "gpu.jsonl")
    assert [one["system"] for one in command.read(tmp_path / "gpu.jsonl")] == ["bare", "cpt", "trainer"]
    assert stopped == ["liger"] and capsys.readouterr().out.count("left for another time") == 2


def test_what_has_a_result_of_this_machine_is_not_run_again(tmp_path):
    path, here = tmp_path / "gpu.jsonl", {"case": "A", "system": "cpt", "gib": None, "tokens_per_second": 1.0, **machine()}
    command.keep(here, path)
    command.keep({**here, "system": "bare", "failed": "exit code 1"}, path)
    there = command.read(path)
    assert command.has_result(there, "A", "cpt", None) and not command.has_result(there, "A", "bare", None)
    assert not command.has_result(there, "A", "cpt", 24) and not command.has_result([{**here, "device": "another"}], "A", "cpt", None)


@pytest.mark.long
def test_a_dry_run_goes_through_every_system(tmp_path):
    words = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--cases", "A", "D", "E"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(": loss ") == 13 and result.stdout.count("reached") == 4 and "NOT REACHED" not in result.stdout
