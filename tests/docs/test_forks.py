"""A forked `cpt` does what an executed one does, and goes when whoever started it goes."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from documented.forks import environment_of_pages, programs_of_forks
from documented.pages import make_folder

pytestmark = pytest.mark.slow
TRAIN = ("cpt", "train", "recipes/tiny/pretrain.yaml", "budget.tokens=2_048", "training.logging_steps=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forks") / "page"
    make_folder(folder)
    return folder


@pytest.fixture(scope="module")
def forking(folder: Path) -> dict[str, str]:
    ours = environment_of_pages() | {"CPT_CACHE": str(folder / ".cache")}
    return ours | {"PATH": f"{programs_of_forks()}{os.pathsep}{ours['PATH']}"}


def run(words, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


def test_it_says_and_writes_the_same_and_ends_with_the_same_code(folder, forking):
    forked = run([*TRAIN, "name=forked"], folder, forking)
    executed = run([*TRAIN, "name=executed"], folder, forking | {"CPT_EXECUTE": "1"})
    assert (forked.returncode, executed.returncode) == (0, 0), forked.stderr
    weights = [
        (folder / "runs" / name / "final" / "model.safetensors").read_bytes() for name in ("forked", "executed")
    ]
    assert weights[0] == weights[1]
    wrong = [
        run(["cpt", "verify", "runs/none"], folder, environment)
        for environment in (forking, forking | {"CPT_EXECUTE": "1"})
    ]
    assert wrong[0].returncode == wrong[1].returncode == 2
    assert wrong[0].stderr.splitlines()[-1:] == wrong[1].stderr.splitlines()[-1:] != []


def test_another_environment_of_imports_is_executed(folder, forking):
    nobody = Path(forking["PATH"].split(os.pathsep)[0]) / "socket"
    nobody.rename(nobody.with_name("hidden"))
    try:
        assert run(["cpt", "runs"], folder, forking).returncode == 1
        assert run(["cpt", "runs"], folder, forking | {"OMP_NUM_THREADS": "2"}).returncode == 0
    finally:
        nobody.with_name("hidden").rename(nobody)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_a_signal_reaches_the_run(number, folder, forking):
    name = f"stopped-by-{number}"
    started = subprocess.Popen([*TRAIN, f"name={name}", "budget.tokens=200_000"], cwd=folder, env=forking)
    metrics = folder / "runs" / name / "metrics.jsonl"
    begun = time.monotonic()
    while not metrics.exists() and time.monotonic() - begun < 120:
        time.sleep(0.1)
    started.send_signal(number)
    assert started.wait(120) == (75 if number == signal.SIGTERM else -number)
    size = metrics.stat().st_size
    time.sleep(2)
    assert metrics.stat().st_size == size
