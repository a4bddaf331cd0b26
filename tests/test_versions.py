"""The lines of versions that docker/ and docs/installing.md are written from."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from cpt.versions import (
    CUDAS,
    FOR_ANY_LINE,
    GPUS,
    LINES,
    STACK,
)

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_every_line_is_what_pyproject_allows():
    extras = [
        one for name in ("bitsandbytes", "liger", "flash", "mamba") for one in PROJECT["optional-dependencies"][name]
    ]
    allowed = {one.name: one.specifier for one in map(Requirement, PROJECT["dependencies"] + extras)}
    for line in LINES:
        versions = {
            **STACK,
            **FOR_ANY_LINE,
            "torch": line.torch,
            **{wheel.package: wheel.version for wheel in line.wheels},
        }
        assert [name for name, version in versions.items() if not allowed[name].contains(version)] == []


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_a_wheel_is_built_for_its_lines_torch_and_cuda(line):
    for wheel in line.wheels:
        assert ".".join(line.torch.split(".")[:2]) in Version(wheel.version).local
        assert line.cuda.replace(".", "") in Version(wheel.version).local.replace(".", "")
        assert wheel.index is None or wheel.index.endswith(f"/cu{line.cuda.replace('.', '')}/")


def test_each_line_has_a_name_of_its_own():
    assert len({line.name for line in LINES}) == len(LINES)


def test_code_runs_on_later_gpus_of_the_same_generation_only():
    old, new = CUDAS["12.6"], CUDAS["12.8"]
    assert old.has_code_for("8.9") and not old.has_code_for("12.0") and not new.has_code_for("7.0")
    assert new.has_code_for("12.0") and not new.has_code_for("11.0")


def test_each_gpu_of_the_page_has_a_line():
    assert all(any(cuda.has_code_for(capability) for cuda in CUDAS.values()) for capability in GPUS)


def test_a_wheel_of_the_web_is_named_for_the_python():
    flash = LINES[-1].wheel("flash-attn")
    assert flash.install_line("3.11").endswith("-cp311-cp311-linux_x86_64.whl'")
