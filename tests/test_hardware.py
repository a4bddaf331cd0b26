"""GPUs, memory, cores and programs of this machine, also where an answer is missing or odd."""

from pathlib import Path

import pytest

from cpt import hardware


def fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_gpus_are_read_from_the_driver(tmp_path, monkeypatch):
    row = "NVIDIA GeForce RTX 4090, 24564, 24000, 550.54.14, 8.9"
    fake_nvidia_smi(tmp_path, monkeypatch, f"echo '{row}'; echo '{row}'")
    gpus = hardware.find_gpus()
    assert [gpu.name for gpu in gpus] == ["NVIDIA GeForce RTX 4090"] * 2
    assert gpus[0].memory_gib == pytest.approx(23.99, abs=0.01)
    assert gpus[0].compute_capability == "8.9"


def test_a_driver_that_fails_means_no_gpu(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch, "echo 'failed, because it could not talk, to, the driver'; exit 9")
    assert hardware.find_gpus() == []


def test_the_smallest_memory_limit_counts(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    limit.write_text(f"{3 * hardware.GIB}\n")
    monkeypatch.setattr(hardware, "CGROUP_MEMORY_LIMITS", (limit, tmp_path / "absent"))
    assert hardware.host_memory_gib() == 3


@pytest.mark.parametrize(("quota", "cores"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None)])
def test_cores_respect_the_containers_quota(tmp_path, monkeypatch, quota, cores):
    limit = tmp_path / "cpu.max"
    limit.write_text(quota)
    monkeypatch.setattr(hardware, "CGROUP_CPU_LIMIT", limit)
    assert hardware.count_cpu_cores() == (cores or len(hardware.os.sched_getaffinity(0)))


def test_a_program_beside_this_python_is_found_without_activation(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert hardware.find_program("pytest") == str(Path(hardware.scripts_folder()) / "pytest")
    assert hardware.find_program("no-such-program") is None
