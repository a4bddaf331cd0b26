"""The doctor names each missing piece with its cost and its remedy, and fails only if nothing can run."""

from dataclasses import replace

import pytest
import torch

from cpt.commands import doctor
from cpt.hardware import INSTALL_LINES, Gpu, describe_machine

GPU = Gpu(
    "NVIDIA H100 80GB HBM3",
    memory_gib=79.6,
    free_gib=79.0,
    driver="580.95",
    compute_capability="9.0",
)


@pytest.fixture
def machine():
    found = {name: f"/usr/bin/{name}" for name in INSTALL_LINES} | {"nvcc": None}
    return replace(
        describe_machine(), gpus=[], programs=found, shared_memory_gib=16.0, free_disk_gib=500.0
    )


def rows(machine):
    return {finding.part: finding for finding in doctor.examine(machine)}


def test_what_is_missing_or_small_has_its_cost_and_remedy(machine):
    found = rows(replace(machine, programs=dict.fromkeys(INSTALL_LINES), shared_memory_gib=0.0625))
    assert found["g++"].remedy == "apt-get install g++" and found["g++"].costs
    assert "--shm-size" in found["shared memory"].remedy
    assert not {"nvcc", "C compiler", "Python.h", "Triton"} & found.keys()  # useless without a GPU
    assert not rows(machine)["shared memory"].costs


def test_kernels_are_for_machines_with_a_gpu(machine):
    without, with_gpu = rows(machine), rows(replace(machine, gpus=[GPU]))
    kernels = doctor.KERNELS.keys()
    assert not kernels & without.keys() and kernels < with_gpu.keys()
    assert all(with_gpu[name].remedy for name in kernels if with_gpu[name].state == "missing")


def test_what_triton_lacks_has_its_own_row_and_remedy(machine):
    failure = "Triton compiles kernels and needs C compiler, not found on this machine"
    broken = replace(
        machine, gpus=[GPU], programs=dict.fromkeys(INSTALL_LINES), triton_failure=failure
    )
    found = rows(broken)
    assert found["C compiler"].remedy == "apt-get install gcc python3-dev"
    assert "apt-get install gcc python3-dev" in found["Python.h"].remedy
    assert failure in found["Triton"].state and "fp32 weights" in found["Triton"].costs
    assert not rows(replace(machine, gpus=[GPU]))["Triton"].costs


@pytest.mark.parametrize(("cuda", "is_missing"), [("12.8", True), ("13.0", False)])
def test_hopper_without_cudnn_attention_gets_a_row(monkeypatch, cuda, is_missing):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor, "torch_problem", lambda gpus: None)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))
    found = {finding.part: finding for finding in doctor.examine_torch([GPU])}
    assert ("cuDNN attention" in found) is is_missing
    assert not is_missing or "driver 580" in found["cuDNN attention"].remedy


def test_a_gpu_on_which_torch_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(doctor, "torch_problem", lambda gpus: None)

    def fails(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with ...")

    monkeypatch.setattr(torch, "ones", fails)
    (row,) = doctor.examine_torch([GPU])
    assert row.is_broken and row.costs.endswith("no kernel image is available")


def test_a_driver_that_is_too_old_for_torch_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (row,) = doctor.examine_torch([replace(GPU, driver="550.54.14")])
    assert row.is_broken and "needs driver 580" in row.costs and doctor.PAGE in row.remedy


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU")
def test_a_gpu_that_torch_cannot_use_is_an_error(machine):
    found = rows(replace(machine, gpus=[GPU]))
    assert "H100 80GB HBM3" in found["GPU 0"].state and found["torch"].is_broken


def test_a_kernel_that_cannot_be_imported_is_shown_with_the_reason_and_the_page(
    tmp_path, monkeypatch
):
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    found = doctor.examine_kernel("flash_attn")
    assert "undefined symbol" in found.costs and doctor.PAGE in found.remedy


def test_a_stack_that_is_too_old_is_an_error(monkeypatch):
    required = ["transformers>=99", "no-such-package>=1", "ruff>=9; extra == 'dev'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: required)
    found = {finding.part: finding for finding in doctor.examine_stack()}
    assert (
        found["transformers"].is_broken
        and found["transformers"].remedy == "pip install 'transformers>=99'"
    )
    assert found["no-such-package"].is_broken and "ruff" not in found


def test_a_line_to_be_copied_is_not_wrapped(monkeypatch, capsys):
    line = "pip install 'a[b] @ https://example.org/" + "long/" * 60 + "flash_attn.whl'"
    monkeypatch.setattr(
        doctor,
        "examine",
        lambda machine: [doctor.Diagnosis("flash-attn", "missing", "speed", line)],
    )
    assert doctor.print_machine() == 0
    assert f"flash-attn: {line}\n" in capsys.readouterr().out
