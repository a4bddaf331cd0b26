"""The lines of versions, and how an installation is compared with them."""

import tomllib
from dataclasses import replace
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
    Installed,
    built_for_another_torch,
    nearest_line,
)

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
CPU = Installed("2.13.0+cpu", None, STACK, "3.11")


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
        assert built_for_another_torch(wheel.version, line.torch) is None
        assert line.cuda.replace(".", "") in Version(wheel.version).local.replace(".", "")
        assert wheel.index is None or wheel.index.endswith(f"/cu{line.cuda.replace('.', '')}/")


def test_each_line_has_a_name_of_its_own():
    assert len({line.name for line in LINES}) == len(LINES)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_an_installation_of_a_line_is_found_as_that_line(line):
    build = line.index.rpartition("/")[2]
    packages = {**STACK, **{wheel.package: wheel.version for wheel in line.wheels}}
    assert nearest_line(Installed(f"{line.torch}+{build}", line.cuda, packages, "3.12")) == (line, [])


def test_the_torch_of_pypi_has_no_build_in_its_version():
    assert nearest_line(replace(CPU, torch="2.13.0", cuda="13.0"))[0].name == "cuda130-torch213"
    assert nearest_line(replace(CPU, torch="2.13.0", cuda="13.0"))[1] == []


def test_the_cuda_weighs_more_than_the_version_of_torch():
    line, (other,) = nearest_line(replace(CPU, torch="2.13.0+cu126", cuda="12.6"))
    assert line.name == "cuda126" and other.there == "2.11.0 for CUDA 12.6"


def test_of_an_unknown_cuda_the_same_major_version_is_nearest():
    line, (other,) = nearest_line(replace(CPU, torch="2.13.0", cuda="13.2"))
    assert line.name == "cuda130-torch213" and other.package == "torch"


def test_a_package_that_is_not_installed_is_no_difference():
    assert nearest_line(replace(CPU, packages={}))[1] == []


def test_a_kernel_of_another_version_is_a_difference():
    line = next(line for line in LINES if line.name == "cuda128")
    _, (other,) = nearest_line(
        Installed("2.11.0+cu128", "12.8", {"causal-conv1d": "1.5.2+cu.12.8.torch.2.11"}, "3.12")
    )
    assert other.install_line == line.wheel("causal-conv1d").install_line("3.12")


@pytest.mark.parametrize(
    ("version", "torch", "other"),
    [
        ("2.8.3+cu128torch2.11", "2.11.0+cu128", None),
        ("2.8.3+cu128torch2.11", "2.13.0", "2.11"),
        ("2.3.2.post1+cu.12.8.torch.2.11", "2.12.1", "2.11"),
        ("2.8.3+cu12torch2.8cxx11abitrue", "2.11.0+cu128", "2.8"),
        ("2.8.3", "2.11.0", None),  # compiled here, or not telling
    ],
)
def test_the_torch_of_a_kernel_is_read_from_its_version(version, torch, other):
    assert built_for_another_torch(version, torch) == other


def test_code_runs_on_later_gpus_of_the_same_generation_only():
    old, new = CUDAS["12.6"], CUDAS["12.8"]
    assert old.has_code_for("8.9") and not old.has_code_for("12.0") and not new.has_code_for("7.0")
    assert new.has_code_for("12.0") and not new.has_code_for("11.0")


def test_each_gpu_of_the_page_has_a_line():
    assert all(any(cuda.has_code_for(capability) for cuda in CUDAS.values()) for capability in GPUS)


def test_a_wheel_of_the_web_is_named_for_the_python():
    flash = LINES[-1].wheel("flash-attn")
    assert flash.install_line("3.11").endswith("-cp311-cp311-linux_x86_64.whl'")
