"""Commands that are run by forks."""

import os
import subprocess
import sys

import pytest

from benchmarks.faults.runs import ROOT

PROGRAM = """
import os, sys
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} got {sys.argv[1:]}, {os.environ['GIVEN']}", flush=True)
sys.exit(3)
"""
SUITE = """
import sys
from pathlib import Path
from benchmarks.faults import forked
if __name__ == "__main__":
    forked.IMPORTED = ("torch.distributed.run",)
    forked.begin_forking({})
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "program.py", "a", "b"]
    started = forked.fork(words, {"GIVEN": "this", "PATH": "/usr/bin"}, Path("output"), Path.cwd())
    print(started.wait(60))
"""  # noqa: E501


@pytest.mark.slow
def test_a_forked_torchrun_and_its_processes_do_what_executed_ones_do(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "suite.py").write_text(SUITE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    codes = subprocess.run(
        [sys.executable, "suite.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, timeout=120
    )
    assert codes.stdout.split() == ["1"]
    said = (tmp_path / "output").read_text()
    assert all(said.count(f"rank {rank} of 2 got ['a', 'b'], this") == 1 for rank in (0, 1))
    assert "exitcode  : 3" in said
