"""The lines of versions that `cpt doctor` names and docker/ is written from."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from cpt.installation import BUILDS
from docker.write import OF_GPUS, STACK

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_every_line_is_what_pyproject_allows():
    extras = [
        one for name in ("bitsandbytes", "liger", "flash", "mamba") for one in PROJECT["optional-dependencies"][name]
    ]
    allowed = {one.name: one.specifier for one in map(Requirement, PROJECT["dependencies"] + extras)}
    for line in BUILDS:
        versions = {
            **STACK,
            **OF_GPUS,
            "torch": line.torch,
            **{wheel.package: wheel.version for wheel in line.wheels},
        }
        assert [name for name, version in versions.items() if not allowed[name].contains(version)] == []


@pytest.mark.parametrize("line", BUILDS, ids=lambda line: line.name)
def test_a_wheel_is_built_for_its_lines_torch_and_cuda(line):
    for wheel in line.wheels:
        assert ".".join(line.torch.split(".")[:2]) in Version(wheel.version).local
        assert line.cuda.replace(".", "") in Version(wheel.version).local.replace(".", "")
        assert wheel.index is None or wheel.index.endswith(f"/cu{line.cuda.replace('.', '')}/")


def test_a_wheel_of_the_web_is_named_for_the_python():
    flash = BUILDS[-1].wheels[0]
    assert flash.install_line("3.11").endswith("-cp311-cp311-linux_x86_64.whl'")
