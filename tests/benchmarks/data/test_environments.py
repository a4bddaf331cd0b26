import subprocess
from types import SimpleNamespace

import pytest

from benchmarks.data import environments
from benchmarks.data.environments import folder_of, install, requirements_of, why_not


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_BENCH_ENVS", str(tmp_path))
    folder_of("litdata").mkdir()


def test_what_was_never_installed_says_how_to():
    assert why_not("litdata") == "not installed: make bench-peers"


def test_what_was_installed_is_not_installed_again(capsys, monkeypatch):
    monkeypatch.setattr(environments, "NAMES", ("litdata",))
    (folder_of("litdata") / "installed.txt").write_text(requirements_of("litdata").read_text())
    environments.main()
    assert capsys.readouterr().out == "litdata: ready\n"


def test_other_requirements_are_noticed():
    (folder_of("litdata") / "installed.txt").write_text("torch==1.0\nlitdata==0.1\n")
    assert "other requirements" in why_not("litdata")


def test_pips_reason_is_kept(monkeypatch):
    error = "WARNING: slow\nERROR: No matching distribution found for litdata==9\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stderr=error))
    install("litdata")
    assert why_not("litdata") == "does not install: No matching distribution found for litdata==9"
