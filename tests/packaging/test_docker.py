"""The image's versions are those of the documentation, and pyproject.toml allows them."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs/howto/installing.md").read_text()
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
EXTRAS = ("bitsandbytes", "liger", "flash", "mamba")
KERNELS = ("flash-attn", "mamba-ssm", "causal-conv1d")


def sets() -> dict[str, dict[str, str]]:
    """The rows of the page's table: name of the set -> column -> version."""
    lines = PAGE[PAGE.index("| set | torch") :].partition("\n\n")[0].splitlines()
    header, _, *rows = lines
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    table = {}
    for row in rows:
        cells = [cell.strip().strip("`") for cell in row.strip("|").split("|")]
        table[cells[0]] = dict(zip(columns, cells, strict=True))
    return table


def kernel_requirements(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(ROOT / "docker/kernels.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def pinned_versions() -> dict[str, str]:
    lines = (ROOT / "docker/versions.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("name", ["cuda126", "cuda128", "cuda130", "cuda130-torch213"])
def test_the_kernels_of_a_set_are_those_of_the_page(name):
    versions = sets()[name]
    kernels = [kernel for kernel in KERNELS if versions[kernel]]
    build = f"cu{versions['CUDA'].replace('.', '')}"
    printed = kernel_requirements(build, versions["torch"], *kernels).stdout
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for kernel in kernels:
        if kernel == "flash-attn":
            file = f"flash_attn-{versions[kernel]}-{python}-{python}-linux_x86_64.whl"
            assert re.search(rf"^flash-attn @ https://.*/{re.escape(file)}$", printed, re.MULTILINE)
        else:
            assert f"\n{kernel}=={versions[kernel]}\n" in printed
            assert f"--extra-index-url https://wheels.astral.sh/simple/{build}/\n" in printed


def test_a_kernel_without_a_wheel_is_refused():
    refused = kernel_requirements("cu130", "2.13.0", "mamba-ssm")
    assert refused.returncode == 2 and not refused.stdout
    assert "no wheel of mamba-ssm for torch 2.13" in refused.stderr


def test_every_version_is_one_that_pyproject_allows():
    extras = [line for name in EXTRAS for line in PROJECT["optional-dependencies"][name]]
    requirements = [Requirement(line) for line in PROJECT["dependencies"] + extras]
    allowed = {requirement.name: requirement.specifier for requirement in requirements}
    for name, version in pinned_versions().items():
        assert allowed[name].contains(version), name
    for versions in sets().values():
        for package in ("torch", *KERNELS):
            assert not versions[package] or allowed[package].contains(versions[package]), package


def test_the_page_names_the_versions_of_the_image():
    sentence = re.search(r"^All sets use (.*?)\.$", PAGE, re.MULTILINE | re.DOTALL)[1]
    for name, version in pinned_versions().items():
        words = name.replace("trl", "TRL").replace("peft", "PEFT").replace("deepspeed", "DeepSpeed")
        assert re.search(rf"{words}\s{re.escape(version)}", sentence), name


def test_the_image_copies_what_the_build_may_see():
    copied = re.findall(r"^COPY (.*) /opt/source\S*$", DOCKERFILE, re.MULTILINE)
    paths = [path for line in copied for path in line.split()]
    visible = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    ]
    assert sorted(paths) == sorted(visible)
    for path in paths:
        assert (ROOT / path).exists(), path
    defaults = dict(re.findall(r'^ARG (\w+)="?([^"\n]*)"?$', DOCKERFILE, re.MULTILINE))
    default_set = sets()["cuda130"]
    assert defaults["TORCH"] == default_set["torch"]
    assert defaults["BUILD"] == "cu130" and f"/cuda:{default_set['CUDA']}." in defaults["IMAGE"]
    assert tuple(defaults["KERNELS"].split()) == KERNELS
