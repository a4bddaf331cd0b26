"""Docker images follow docker/builds.py and pyproject.toml."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from docker import write
from docker.builds import BUILDS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("bitsandbytes", "liger", "flash", "mamba")


def test_what_is_in_the_folder_is_what_would_be_written():
    written = write.files()
    assert {
        path for path in (ROOT / "docker").iterdir() if path.suffix in (".Dockerfile", ".txt")
    } == set(written)
    changed = [path.name for path, text in written.items() if path.read_text() != text]
    assert changed == [], "run: python -m docker.write"


def test_every_version_of_a_build_is_one_that_pyproject_allows():
    extras = [one for name in EXTRAS for one in PROJECT["optional-dependencies"][name]]
    allowed = {
        one.name: one.specifier for one in map(Requirement, PROJECT["dependencies"] + extras)
    }
    for line in BUILDS:
        versions = {**write.STACK, **write.OF_GPUS, "torch": line.torch}
        versions |= {wheel.package: wheel.version for wheel in line.wheels}
        assert [
            name for name, version in versions.items() if not allowed[name].contains(version)
        ] == []
