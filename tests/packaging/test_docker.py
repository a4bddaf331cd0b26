"""Docker images follow docker/builds.py and pyproject.toml."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from docker import write
from docker.builds import BUILDS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
EXTRAS = ("bitsandbytes", "liger", "flash", "mamba")


def test_what_is_in_the_folder_is_what_would_be_written():
    written = write.files()
    assert {path for path in (ROOT / "docker").iterdir() if path.suffix in (".Dockerfile", ".txt")} == set(written)
    changed = [path.name for path, text in written.items() if path.read_text() != text]
    assert changed == [], "run: python -m docker.write"


def test_every_version_of_a_build_is_one_that_pyproject_allows():
    extras = [one for name in EXTRAS for one in PROJECT["optional-dependencies"][name]]
    allowed = {one.name: one.specifier for one in map(Requirement, PROJECT["dependencies"] + extras)}
    for line in BUILDS:
        versions = {**write.STACK, **write.OF_GPUS, "torch": line.torch}
        versions |= {wheel.package: wheel.version for wheel in line.wheels}
        assert [name for name, version in versions.items() if not allowed[name].contains(version)] == []


def copied(dockerfile):
    """What an image takes out of the repository."""
    lines = re.findall(r"^COPY (.+) \S+$", dockerfile.read_text(), re.MULTILINE)
    return [name for line in lines for name in line.split()]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_what_an_image_copies_is_there_and_not_ignored(path):
    admitted = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name in copied(path):
        assert (ROOT / name).exists()
        assert name in admitted or (name.endswith(".txt") and "docker/*.txt" in admitted)
