"""The Dockerfiles and their requirements follow cpt/commands/doctor.py, and what they copy is enough."""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cpt.commands.doctor import BUILDS
from docker import write

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
HADOLINT = Path(sysconfig.get_path("scripts")) / "hadolint"


def test_what_is_in_the_folder_is_what_would_be_written():
    written = write.files()
    there = {path for path in (ROOT / "docker").iterdir() if path.suffix in (".Dockerfile", ".txt")}
    assert there == set(written)
    assert [path.name for path, text in written.items() if path.read_text() != text] == [], (
        "run: python -m docker.write"
    )


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_a_linter_finds_nothing_in_a_dockerfile(path):
    linted = subprocess.run([HADOLINT, path], capture_output=True, text=True)
    assert linted.stdout + linted.stderr == "" and linted.returncode == 0


@pytest.mark.parametrize("line", BUILDS, ids=lambda line: line.name)
def test_every_dependency_of_cpt_is_in_an_images_requirements(line):
    given = [Requirement(text) for text in write.requirements(line) if not text.startswith(("#", "--"))]
    assert {Requirement(text).name for text in write.dependencies()} <= {one.name for one in given}
    assert str(given[0]) == f"torch=={line.torch}+{'cu' + line.cuda.replace('.', '') if line.cuda else 'cpu'}"


def copied(dockerfile: Path) -> list[str]:
    """What an image takes out of the repository."""
    lines = re.findall(r"^COPY (.+) \S+$", dockerfile.read_text(), re.MULTILINE)
    return [name for line in lines for name in line.split()]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_what_an_image_copies_is_there_and_not_ignored(path):
    admitted = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name in copied(path):
        assert (ROOT / name).exists()
        assert name in admitted or (name.endswith(".txt") and "docker/*.txt" in admitted)


@pytest.mark.slow
def test_what_an_image_copies_is_enough_to_build_cpt(tmp_path):
    (tmp_path / "source").mkdir()
    for name in copied(ROOT / "docker/cpu.Dockerfile"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / "source" / name)
        elif not name.startswith("docker/"):
            shutil.copy(ROOT / name, tmp_path / "source" / name)
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        "./source",
    ]
    subprocess.run(words, cwd=tmp_path, check=True)
    assert len(list(tmp_path.glob("cpt-*.whl"))) == 1
