import json
import subprocess
import sys

import pytest

from benchmarks.data.results import RESULTS
from benchmarks.data.systems import ROOT

SMALL = [
    "--mb",
    "2",
    "--slow-mb",
    "2",
    "--repetitions",
    "1",
    "--growth",
    "1,2",
    "--growth-of-run-clm",
    "0",
    "--vocabulary",
    "2000",
]


@pytest.mark.long
def test_the_whole_command_runs_without_peers(tmp_path):
    command = [sys.executable, "-m", "benchmarks.data", *SMALL, "--systems", "ours,gigatoken,hugging_face,run_clm"]
    committed = (RESULTS / "data.json").read_bytes()
    ended = subprocess.run([*command, "--results", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    results = json.loads((tmp_path / "data.json").read_text())
    assert not [system for system in results["systems"].values() if "failed" in system]
    assert results["failures"] == {}
    assert results["waste"]["systems"]["ours"]["lost"] <= 1e-9
    assert (
        max(abs(share - results["mixture"]["asked"][name]) for name, share in results["mixture"]["ours"].items())
        < 0.001
    )
    assert len(results["growth"]) == 2
    assert (RESULTS / "data.json").read_bytes() == committed, "only results that are asked for are written"
