import json
import sys

import pytest

from benchmarks.data import systems
from benchmarks.data.environments import NAMES, requirements_of
from benchmarks.data.peers.clock import Job
from benchmarks.data.systems import PEERS, SYSTEMS, system_ended


def run(program, tmp_path):
    return system_ended([sys.executable, "-c", program], tmp_path)


def test_a_program_that_crashes_is_told_and_harms_nothing(tmp_path):
    assert run("raise RuntimeError('no such column')", tmp_path) == {"failed": "RuntimeError: no such column"}


def test_a_program_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(systems, "LONGEST_SECONDS", 0.5)
    assert "longer than" in run("import time; time.sleep(60)", tmp_path)["failed"]


@pytest.mark.slow
def test_memory_is_watched_also_of_what_a_program_starts(tmp_path):
    child = "import time; x = bytearray(90_000_000); time.sleep(0.8)"
    program = (
        f"import json, subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}]); print(json.dumps({{'done':"
        " 1}))"
    )
    measured = run(program, tmp_path)
    assert measured["done"] == 1
    assert 90 < measured["worker_own_memory_mb"] < 150
    assert measured["worker_peak_memory_mb"] >= measured["worker_own_memory_mb"]
    assert measured["own_memory_mb"] < 80


def test_settings_of_the_shell_do_not_reach_a_program(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    program = "import json, os; print(json.dumps({'threads': os.environ.get('OMP_NUM_THREADS')}))"
    assert run(program, tmp_path)["threads"] is None


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_has_its_program_and_its_environment(name, tmp_path):
    system = SYSTEMS[name]
    command = system.command("cold", Job(tmp_path, tmp_path, tmp_path, tmp_path, 2))
    assert json.loads(command[-1])["variant"] == system.variant
    assert system.environment is None or system.environment in NAMES
    assert not system.program.endswith(".py") or (PEERS / system.program).exists()


@pytest.mark.parametrize("file", sorted(PEERS.glob("*.py")), ids=lambda file: file.name)
def test_no_peer_imports_ours(file):
    assert "import cpt" not in file.read_text()
    assert "from cpt" not in file.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_torch_is_the_first_that_an_environment_gets(name):
    first, *others = requirements_of(name).read_text().splitlines()
    assert first.startswith("torch==")
    assert all("==" in line for line in others)
