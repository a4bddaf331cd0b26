"""The commands, without a GPU."""

import json
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


def test_a_micro_batch_without_room_is_halved_until_it_has(monkeypatch, tmp_path):
    def run(words, **_):
        parts = int(words[words.index("--parts") + 1])
        found = {"failed": "out of memory"} if parts < 4 else {"tokens_per_second": 1.0}
        Path(words[6]).write_text(json.dumps({"parts": parts, **found}))
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(command.subprocess, "run", run)
    assert command.run_apart(CASES["B"], "trainer", tmp_path, 100, None) == {"parts": 4, "tokens_per_second": 1.0}
    assert command.run_apart(CASES["H"], "cpt", tmp_path, 100, None)["failed"] == "out of memory", (
        "gradients that are dropped cannot add up"
    )


def test_a_process_that_dies_or_hangs_is_a_result_too(monkeypatch, tmp_path):
    def die(words, stdout, **_):
        stdout.write("a line\nRuntimeError: no such kernel\n")
        return subprocess.CompletedProcess(words, 1)

    def hang(words, **_):
        raise subprocess.TimeoutExpired(words, 5)

    monkeypatch.setattr(command.subprocess, "run", die)
    assert command.run_apart(CASES["A"], "cpt", tmp_path, 100, None)["failed"] == "exit code 1: RuntimeError: no such kernel"
    monkeypatch.setattr(command.subprocess, "run", hang)
    assert command.run_apart(CASES["A"], "cpt", tmp_path, 100, 24)["failed"] == "took longer than 100 seconds"


def test_what_has_a_result_of_this_machine_is_not_run_again(tmp_path):
    path, here = tmp_path / "gpu.jsonl", {"case": "A", "system": "cpt", "gib": None, "tokens_per_second": 1.0, **machine()}
    command.keep(here, path)
    command.keep({**here, "system": "bare", "failed": "exit code 1"}, path)
    there = command.read(path)
    assert command.has_result(there, "A", "cpt", None) and not command.has_result(there, "A", "bare", None)
    assert not command.has_result(there, "A", "cpt", 24) and not command.has_result([{**here, "device": "another"}], "A", "cpt", None)


@pytest.mark.slow
def test_a_dry_run_goes_through_every_system(tmp_path):
    words = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--cases", "A", "D", "E"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(": loss ") == 13 and result.stdout.count("reached") == 4 and "NOT REACHED" not in result.stdout
