"""The doctor names each missing piece with its cost and its remedy, and fails only where nothing can run."""

import re
from dataclasses import replace

import pytest

from cpt import doctor
from cpt.hardware import Gpu, describe_machine

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
    assert all(word in printed for word in ("torch", "host memory", "shared memory", "g++", "deepspeed"))


def test_a_missing_compiler_has_its_cost_and_install_line(machine):
    found = rows(replace(machine, programs={"g++": None, "ninja": None, "nvcc": None}))
    assert found["g++"].remedy == "apt-get install g++"
    assert "DeepSpeed" in found["g++"].costs
    assert "nvcc" not in found  # of no use without a GPU


def test_without_a_gpu_kernels_for_gpus_are_not_asked_for(machine):
    assert "flash_attn" not in rows(machine)
    assert "CPU" in rows(machine)["GPU"].costs


def test_a_gpu_that_torch_cannot_use_is_an_error(machine):
    found = rows(replace(machine, gpus=[GPU]))
    assert "H100 80GB HBM3, 79.6 GiB" in found["GPU 0"].here
    if not doctor.importlib.import_module("torch").cuda.is_available():
        assert found["torch"].broken and "the GPU is not used" in found["torch"].costs


def test_what_a_gpu_lacks_is_listed(machine):
    missing = [f for f in rows(replace(machine, gpus=[GPU])).values() if f.part in doctor.FOR_GPUS and f.here == "missing"]
    assert all(finding.costs and finding.remedy for finding in missing)


def test_little_shared_memory_is_told(machine):
    assert "--shm-size" in rows(replace(machine, shared_memory_gib=0.0625))["shared memory"].remedy
    assert rows(machine)["shared memory"].costs == ""


def test_little_disk_is_told(machine):
    assert "checkpoint" in rows(replace(machine, free_disk_gib=3.0))["free disk here"].costs


def test_a_stack_that_is_too_old_is_an_error(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["transformers>=99", "no-such-package>=1", "ruff>=9; extra == 'dev'"])
    found = {finding.part: finding for finding in doctor.examine_stack()}
    assert found["transformers"].broken and found["transformers"].remedy == "pip install 'transformers>=99'"
    assert found["no-such-package"].broken
    assert "ruff" not in found


def test_an_optional_package_shows_its_version():
    assert re.match(r"\d+\.", doctor.examine_package("yaml", "", "").here)
    assert doctor.examine_package("no_such_package", "speed", "pip install it").costs == "speed"


def test_square_brackets_are_printed_as_they_are(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda machine: [doctor.Finding("x", "missing", "speed", "pip install a[b]")])
    doctor.run_doctor()
    assert "a[b]" in capsys.readouterr().out
