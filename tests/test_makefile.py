"""The Makefile's targets, told by make itself without running them."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("MAKE", "VENV", "PYTHON", "TORCH_", "WORKERS", "ARGS"))
}


def make(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = CLEAN if path is None else {**CLEAN, "PATH": path}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def would_run(*arguments: str, path: str | None = None) -> str:
    result = make("--dry-run", "VENV=.venv-absent", *arguments, path=path)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_help_lists_every_target():
    listed = re.findall(r"^make ([a-z-]+)", make("help").stdout, re.MULTILINE)
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert sorted(listed) == sorted(phony.group(1).split())
    assert make().stdout == make("help").stdout


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("demo", "/cpt demo"),
        ("test", "-m pytest --durations 10 -n 2"),
        ("test-slow", "-m 'slow and not long and not browser and not quantized and not cluster and"),
        ("test-browser", "-m browser"),
        ("test-gpu", "-m 'gpu and not quantized'"),
        ("test-quantized", "/quantized/bin/python -m pytest --durations 10 -m 'quantized"),
        ("train-prototype", "cpt/train.py recipes/prototype_rtx4090.yaml"),
        ("train-production", "torchrun --nproc_per_node 4 cpt/train.py recipes/production_multi_gpu.yaml"),
        ("check", "ruff format --check"),
        ("check", "bin/mypy"),
        ("docs", "-m cpt.reference"),
        ("docs", "-m sphinx -c docs --fail-on-warning"),
        ("docs-links", "-b linkcheck"),
    ],
)
def test_a_target_makes_its_environment_and_runs_its_command(target, command):
    planned = would_run(target)
    assert command in planned
    assert planned.index("-m venv --clear .venv-absent") < planned.index(command)


def test_torch_is_installed_before_what_depends_on_it():
    planned = would_run("setup", "HAS_GPU=")
    assert planned.index("'torch==2.13.0'") < planned.index("'.[dev]'")


def test_a_gpu_gets_any_recent_torch(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)'\n")
    program.chmod(0o755)
    assert "pip install --quiet 'torch>=2.11'\n" in would_run("setup", path=f"{tmp_path}:{os.environ['PATH']}")


def test_pytorchs_own_index_can_be_named():
    assert "'torch==2.13.0' --index-url https://example.org/cpu" in would_run(
        "setup", "TORCH_CPU_INDEX=--index-url https://example.org/cpu"
    )


def test_an_old_python_is_refused_with_what_to_say(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = make("setup", f"VENV={tmp_path}/venv", f"PYTHON={old}")
    assert result.returncode != 0
    assert "cpt needs Python 3.11 or newer" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_the_environment_is_made_anew_when_pyproject_changes(tmp_path):
    installed = tmp_path / ".installed"
    installed.touch()
    assert make("--dry-run", "setup", f"VENV={tmp_path}").stdout.strip() in (
        "",
        "make: Nothing to be done for 'setup'.",
    )
    os.utime(installed, (0, 0))
    assert "-m venv --clear" in make("--dry-run", "setup", f"VENV={tmp_path}").stdout


def test_ci_script_is_sound_and_calls_the_readmes_command():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    assert "make test\n" in script.read_text() and "make test" in (ROOT / "README.md").read_text()
