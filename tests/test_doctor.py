"""The doctor names each missing piece with its cost and its remedy, and fails only where nothing can run."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cpt import doctor
from cpt.errors import LaunchError
from cpt.hardware import Gpu, describe_machine
from cpt.versions import STACK, Installed

CUDA_128 = Installed("2.11.0+cu128", "12.8", {**STACK, "flash-attn": "2.8.3+cu128torch2.11"}, "3.12")
GPU = Gpu("NVIDIA H100 80GB HBM3", memory_gib=79.6, free_gib=79.0, driver="580.95", compute_capability="9.0")


@pytest.fixture
def machine():
    found = {"g++": "/usr/bin/g++", "ninja": "/usr/bin/ninja", "nvcc": None}
    return replace(describe_machine(), gpus=[], programs=found, shared_memory_gib=16.0, free_disk_gib=500.0)


def rows(machine) -> dict[str, doctor.Finding]:
    return {finding.part: finding for finding in doctor.examine(machine)}


def test_this_machine_can_run_cpt(capsys):
    assert doctor.run_doctor() == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("torch", "versions", "host memory", "shared memory", "g++", "deepspeed"))


def test_a_missing_compiler_has_its_cost_and_install_line(machine):
    found = rows(replace(machine, programs={"g++": None, "ninja": None, "nvcc": None}))
    assert found["g++"].remedy == "apt-get install g++"
    assert "DeepSpeed" in found["g++"].costs
    assert "nvcc" not in found  # of no use without a GPU


def test_without_a_gpu_kernels_for_gpus_are_not_asked_for(machine):
    assert not {*doctor.KERNELS, "flash_attn_interface"} & set(rows(machine))
    assert "CPU" in rows(machine)["GPU"].costs


def test_a_gpu_that_torch_cannot_use_is_an_error(machine):
    found = rows(replace(machine, gpus=[GPU]))
    assert "H100 80GB HBM3, 79.6 GiB" in found["GPU 0"].here
    if not doctor.importlib.import_module("torch").cuda.is_available():
        assert found["torch"].broken and "the GPU is not used" in found["torch"].costs


def test_what_a_gpu_lacks_is_listed(machine):
    found = rows(replace(machine, gpus=[GPU]))
    assert {*doctor.KERNELS, "flash_attn_interface"} <= set(found)
    assert all(found[name].remedy for name in doctor.KERNELS if found[name].here == "missing")


def test_an_installation_of_one_line_is_called_by_its_name():
    (found,) = doctor.examine_versions(CUDA_128)
    assert "line `cuda128` of docs/installing.md" in found.here and not found.costs


def test_what_was_run_here_is_told_from_what_others_say():
    (run,) = doctor.examine_versions(replace(CUDA_128, torch="2.13.0+cpu", cuda=None))
    (told,) = doctor.examine_versions(CUDA_128)
    assert "tests ran with these" in run.here and "what the projects publish" in told.here


def test_each_package_outside_of_the_line_has_the_command_that_changes_it():
    other = replace(CUDA_128, torch="2.12.1+cu128", packages={**CUDA_128.packages, "trl": "1.10.0"})
    torch, trl = doctor.examine_versions(other)
    assert torch.remedy == "pip install torch==2.11.0 --index-url https://download.pytorch.org/whl/cu128"
    assert trl.here == "1.10.0 (`cuda128`: 1.16.0)" and trl.remedy == "pip install trl==1.16.0"


def test_a_torch_that_no_kernels_compile_for_is_told():
    findings = list(doctor.examine_versions(replace(CUDA_128, torch="2.15.0", cuda="13.2")))
    assert "C++20" in findings[0].costs
    assert not any(
        "C++20" in finding.costs for finding in doctor.examine_versions(replace(CUDA_128, torch="2.12.1+cu128"))
    )


def test_a_gpu_that_this_torch_has_no_code_for_is_an_error_with_the_build_that_has():
    new = Gpu("NVIDIA GeForce RTX 5090", memory_gib=31.4, free_gib=31.0, driver="570.86", compute_capability="12.0")
    (found,) = doctor.examine_fit([new], "12.6")
    assert found.broken and "no code for compute capability 12.0" in found.costs
    assert found.remedy == "pip install torch==2.11.0 --index-url https://download.pytorch.org/whl/cu128"
    assert not list(doctor.examine_fit([new], "12.8"))


def test_a_driver_that_is_too_old_for_the_cuda_is_an_error():
    (found,) = doctor.examine_fit([replace(GPU, driver="550.54")], "13.0")
    assert found.broken and "driver 580" in found.costs
    assert not list(doctor.examine_fit([replace(GPU, driver="550.54")], "12.8"))


def test_of_a_cuda_that_the_table_lacks_nothing_is_claimed():
    assert not list(doctor.examine_fit([replace(GPU, driver="400.1")], "13.2"))


def test_kernels_of_another_torch_are_told_with_the_wheel_that_fits():
    built = replace(CUDA_128, packages={"flash-attn": "2.8.3+cu128torch2.10"})
    found = doctor.examine_kernel("flash-attn", built)
    assert "built for torch 2.10" in found.costs and "cu128torch2.11-cp312" in found.remedy
    assert not doctor.examine_kernel("flash-attn", CUDA_128).costs


@pytest.mark.parametrize(
    ("package", "torch", "cuda"),
    [("mamba-ssm", "2.13.0+cu130", "13.0"), ("flash-attn", "2.14.1", "13.0"), ("flash-attn", "2.11.0", "12.9")],
)
def test_where_nobody_builds_a_kernel_no_command_is_made_up(package, torch, cuda):
    found = doctor.examine_kernel(package, replace(CUDA_128, torch=torch, cuda=cuda, packages={}))
    assert (
        found.here == "missing"
        and found.remedy == f"nobody is known to build it for torch {torch}: docs/installing.md"
    )


def test_little_shared_memory_is_told(machine):
    assert "--shm-size" in rows(replace(machine, shared_memory_gib=0.0625))["shared memory"].remedy
    assert rows(machine)["shared memory"].costs == ""


def test_little_disk_is_told(machine):
    assert "checkpoint" in rows(replace(machine, free_disk_gib=3.0))["free disk here"].costs


def test_a_stack_that_is_too_old_is_an_error(monkeypatch):
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda name: ["transformers>=99", "no-such-package>=1", "ruff>=9; extra == 'dev'"]
    )
    found = {finding.part: finding for finding in doctor.examine_stack()}
    assert found["transformers"].broken and found["transformers"].remedy == "pip install 'transformers>=99'"
    assert found["no-such-package"].broken
    assert "ruff" not in found


def test_an_optional_package_shows_its_version():
    assert re.match(r"\d+\.", doctor.examine_package("yaml", "", "").here)
    assert doctor.examine_package("no_such_package", "speed", "pip install it").costs == "speed"


def test_square_brackets_are_printed_as_they_are(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor, "examine", lambda machine: [doctor.Finding("x", "missing", "speed", "pip install a[b]")]
    )
    doctor.run_doctor()
    assert "a[b]" in capsys.readouterr().out


def test_a_command_to_be_copied_stands_in_one_line(monkeypatch, capsys):
    line = "pip install 'flash-attn @ https://example.org/" + "long/" * 60 + "flash_attn.whl'"
    monkeypatch.setattr(doctor, "examine", lambda machine: [doctor.Finding("flash-attn", "missing", "speed", line)])
    doctor.run_doctor()
    assert f"flash-attn: {line}\n" in capsys.readouterr().out


def test_nodes_are_compared_under_a_launcher_only(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(LaunchError, match="torchrun --nnodes 2"):
        doctor.command(recipe=Path("r.yaml"))
