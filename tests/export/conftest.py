"""Exports that are loaded back in this process, by the script that a new process would run."""

import json
import runpy
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def reloads_here(monkeypatch):
    """Run reload.py here: a new process takes seconds; the jobs that it was given."""
    jobs = []

    def run(command, *, env, **_):
        python, isolated, script, job = command
        assert (python, isolated) == (sys.executable, "-I") and env["HF_HUB_OFFLINE"] == "1"
        jobs.append(json.loads(Path(job).read_text()))
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [script, job])
            patch.setitem(sys.modules, "cpt", sys.modules["cpt"])  # the script makes it None
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as ended:
                return SimpleNamespace(returncode=1, stderr=str(ended))
            except Exception:
                return SimpleNamespace(returncode=1, stderr=traceback.format_exc())
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr("cpt.export.proof.subprocess", SimpleNamespace(run=run))
    return jobs
