"""Wheel and sdist: what is in them, and that an installed cpt works in an empty folder."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from tiny import write_documents

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(*words: str | Path, folder: Path, **variables: str) -> str:
    """What a command prints; the test fails with it where it fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    ended = subprocess.run(
        list(map(str, words)), cwd=folder, env={**kept, **variables}, capture_output=True, text=True
    )
    assert ended.returncode == 0, f"{words}: {ended.stdout[-3000:]}{ended.stderr[-3000:]}"
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built out of it, with the packages that are installed."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The programs of an environment that has this wheel, and all else from the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", symlinks=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", own, built[1], folder=folder)
    (own / "others.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (own / "zz_no_clone.pth").write_text(
        f"import sys; sys.path[:] = [one for one in sys.path if one != {str(ROOT)!r}]\n"
    )
    return folder / "venv" / "bin"


def test_the_wheel_has_the_package_and_what_comes_with_it_and_nothing_else(built):
    names = {Path(name) for name in zipfile.ZipFile(built[1]).namelist()}
    assert {name.parts[0] for name in names} == {"cpt", "cpt-0.1.0.dist-info"}
    code = {path.relative_to(ROOT) for path in (ROOT / "cpt").rglob("*.py")}
    files = tracked("recipes", "deepspeed_configs", "launch")
    assert {name for name in names if name.suffix == ".py" and "shipped" not in name.parts} == code
    assert {name.relative_to("cpt/shipped") for name in names if name.is_relative_to("cpt/shipped")} == files
    assert Path("cpt/py.typed") in names


def tracked(*folders: str) -> set[Path]:
    """Files that git knows and that are there."""
    if not (ROOT / ".git").exists():
        pytest.skip("not in a clone")
    listed = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return {Path(name) for name in listed if (ROOT / name).is_file()}


def test_an_installed_cpt_goes_from_documents_to_a_model_in_an_empty_folder(installed, tmp_path):
    place = run(installed / "python", "-c", "import cpt; print(cpt.__file__)", folder=tmp_path).strip()
    assert Path(place).is_relative_to(installed.parent)

    def cpt(*words: str | Path) -> str:
        return run(
            installed / "python",
            "-m",
            "cpt",
            *words,
            folder=tmp_path,
            CPT_CACHE=str(tmp_path / "cache"),
            OMP_NUM_THREADS="1",
        )

    assert cpt("--version") == "cpt 0.1.0\n"
    assert "torch" in cpt("doctor")
    cpt("recipes", "--copy", ".")
    short = ("budget.tokens=2048", "checkpoints.every_steps=2")
    cpt("train", "recipes/tiny/pretrain.yaml", *short)
    assert (tmp_path / "runs/tiny-pretrain/final/model.safetensors").is_file()
    launch = (installed / "python", "-m", "accelerate.commands.launch", "--cpu", "-m", "cpt.train")
    run(
        *launch,
        "recipes/tiny/cpt.yaml",
        *short,
        folder=tmp_path,
        CPT_CACHE=str(tmp_path / "cache"),
        OMP_NUM_THREADS="1",
    )
    assert (tmp_path / "runs/tiny-cpt/final/model.safetensors").is_file()
    write_documents(tmp_path / "documents.jsonl", 80, seed=1)
    write_documents(tmp_path / "general.jsonl", 80, seed=2)
    base = ("--model", "runs/tiny-pretrain/final", "--gpu", "cpu", "--general", "general.jsonl")
    assert "recipe.yaml is written" in cpt("init", "documents.jsonl", *base)
    cpt("check", "recipe.yaml")
