"""Wheel and sdist: what is in them, and that an installed cpt works in an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from tiny import write_documents

from cpt import files

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "install", "--quiet")


def run(*words, folder, **variables):
    """What a command prints; the test fails with it where it fails."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    words = list(map(str, words))
    ended = subprocess.run(
        words, cwd=folder, env={**kept, **variables}, capture_output=True, text=True
    )
    assert ended.returncode == 0, f"{words}: {ended.stdout[-3000:]}{ended.stderr[-3000:]}"
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built out of the sdist, with the packages that are installed."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    assert next(folder.glob("*.tar.gz"))
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The Python of an environment that has this wheel, and all else from the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", symlinks=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    run(*PIP, "--no-deps", "--target", own, wheel, folder=folder)
    (own / "others.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    without_clone = f"import sys; sys.path[:] = [one for one in sys.path if one != {str(ROOT)!r}]\n"
    (own / "zz_no_clone.pth").write_text(without_clone)
    return folder / "venv" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not in a clone")
def test_the_wheel_has_the_package_and_what_comes_with_it_and_nothing_else(wheel):
    listed = run(
        "git", "ls-files", "recipes", "deepspeed_configs", "launch", folder=ROOT
    ).splitlines()
    tracked = {Path(name) for name in listed if (ROOT / name).is_file()}
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {name.parts[0] for name in names} == {"cpt", "continued_pretraining-0.1.0.dist-info"}
    code = {path.relative_to(ROOT) for path in (ROOT / "cpt").rglob("*.py")}
    assert {name for name in names if name.suffix == ".py" and "shipped" not in name.parts} == code
    assert {
        name.relative_to("cpt/shipped") for name in names if name.is_relative_to("cpt/shipped")
    } == tracked
    assert Path("cpt/py.typed") in names


@pytest.mark.slow
def test_an_installed_cpt_goes_from_documents_to_a_model_in_an_empty_folder(python, tmp_path):
    own = {"CPT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def cpt(*words):
        return run(python, "-m", "cpt", *words, folder=tmp_path, **own)

    place = run(python, "-c", "import cpt; print(cpt.__file__)", folder=tmp_path).strip()
    assert Path(place).is_relative_to(python.parents[1])
    assert cpt("--version") == "cpt 0.1.0\n" and "torch" in cpt("doctor")
    cpt("recipes", "--copy", ".")
    short = ("budget.tokens=2048", "checkpoints.every_steps=2")
    cpt("train", "recipes/tiny/pretrain.yaml", *short)
    launch = (python, "-m", "accelerate.commands.launch", "--cpu", "-m", "cpt.train")
    run(*launch, "recipes/tiny/cpt.yaml", *short, folder=tmp_path, **own)
    assert (tmp_path / "runs/tiny-cpt/final/model.safetensors").is_file()
    write_documents(tmp_path / "documents.jsonl", 80, seed=1)
    write_documents(tmp_path / "general.jsonl", 80, seed=2)
    base = ("--model", "runs/tiny-pretrain/final", "--gpu", "cpu", "--general", "general.jsonl")
    cpt("init", "documents.jsonl", *base)
    cpt("check", "recipe.yaml")


def test_an_installed_package_finds_its_files_inside_and_a_clone_at_its_top(tmp_path, monkeypatch):
    assert (files.SHIPPED_FILES / "recipes/demo.yaml").is_file()
    package = tmp_path / "cpt"
    (package / "shipped").mkdir(parents=True)
    monkeypatch.setattr(files, "__file__", str(shutil.copy(files.__file__, package)))
    assert files.find_shipped_files() == package / "shipped"


def test_a_launcher_starts_the_file_in_a_clone_and_the_module_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(files.SHIPPED_FILES)
    assert files.training_program() == "cpt/train.py"
    monkeypatch.chdir(tmp_path)
    assert files.training_program() == "-m cpt.train"
