"""GPUs, memory, cores and programs of this machine, and whether torch and Triton can use its GPU."""

import sysconfig
from pathlib import Path

import pytest

from cpt import hardware
from cpt.errors import ResourceError
from cpt.hardware import Gpu


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
    fake_nvidia_smi(
        tmp_path, monkeypatch, "echo 'failed, because it could not talk, to, the driver'; exit 9"
    )
    assert hardware.find_gpus() == []


def test_the_smallest_memory_limit_counts(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    limit.write_text(f"{3 * hardware.GIB}\n")
    monkeypatch.setattr(hardware, "CGROUP_MEMORY_LIMITS", (limit, tmp_path / "absent"))
    assert hardware.host_memory_gib() == 3


@pytest.mark.parametrize(
    ("quota", "cores"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None)]
)
def test_cores_respect_the_containers_quota(tmp_path, monkeypatch, quota, cores):
    limit = tmp_path / "cpu.max"
    limit.write_text(quota)
    monkeypatch.setattr(hardware, "CGROUP_CPU_LIMIT", limit)
    assert hardware.count_cpu_cores() == (cores or len(hardware.os.sched_getaffinity(0)))


def test_a_program_beside_this_python_is_found_without_activation(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert hardware.find_program("pytest") == str(Path(hardware.scripts_folder()) / "pytest")
    assert hardware.find_program("no-such-program") is None


@pytest.mark.parametrize(
    ("statistics", "used"),
    [("anon 2147483648\nfile 999\nshmem 1073741824", 3), ("total_rss 1073741824", 1)],
)
def test_free_memory_in_a_container_is_what_its_limit_leaves(
    tmp_path, monkeypatch, statistics, used
):
    (tmp_path / "memory.max").write_text(f"{4 * hardware.GIB}\n")
    (tmp_path / "memory.stat").write_text(statistics)
    monkeypatch.setattr(
        hardware, "CGROUP_MEMORY_LIMITS", (tmp_path / "memory.max", tmp_path / "none" / "limit")
    )
    assert hardware.free_host_memory_gib() == 4 - used


# --- torch and Triton on the GPU --------------------------------------------------------------------------------

CUDA_126 = [
    "sm_50",
    "sm_60",
    "sm_70",
    "sm_75",
    "sm_80",
    "sm_86",
    "sm_90",
]  # `torch.cuda.get_arch_list()` of wheels
CUDA_130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


def gpu(capability: str, driver: str = "580.95.05") -> Gpu:
    return Gpu("NVIDIA GPU", 24.0, 23.0, driver, capability)


@pytest.mark.parametrize(
    ("machine", "cuda", "architectures", "reason"),
    [
        (gpu("8.9"), "13.0", CUDA_130, None),  # RTX 4090: the code for sm_86
        (gpu("8.9", "550.54.14"), "12.6", CUDA_126, None),
        (gpu("8.9", "570.133.20"), "13.0", [], "needs driver 580 or newer"),
        (gpu("8.0", "470.57.02"), "12.8", [], "needs driver 525 or newer"),
        (gpu("7.0"), "12.6", CUDA_126, None),  # V100
        (gpu("7.0"), "13.0", CUDA_130, "not for capability 7.0"),
        (
            gpu("8.0"),
            "12.6",
            ["sm_86", "sm_90"],
            "not for capability 8.0",
        ),  # code for a later GPU of its generation
        (gpu("12.0"), "12.6", CUDA_126, "not for capability 12.0"),  # RTX 5090
        (gpu("12.0"), "13.0", CUDA_130, None),
        (gpu("9.0"), None, [], "build for the CPU"),
    ],
)
def test_torch_s_build_is_compared_with_the_gpu_and_its_driver(
    machine, cuda, architectures, reason
):
    found = hardware.why_torch_fails(machine, cuda, architectures)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("capability", "cuda", "is_missing"),
    [("9.0", "12.6", True), ("9.0", "12.8", True), ("9.0", "12.9", False), ("9.0", "13.0", False)]
    + [("8.9", "12.6", False), ("9.0", None, False)],
)
def test_hopper_lacks_cudnn_attention_below_cuda_12_9(capability, cuda, is_missing):
    assert hardware.lacks_cudnn_attention(gpu(capability), cuda) is is_missing


@pytest.fixture
def unasked(monkeypatch):
    """A process tree in which nobody has tried Triton."""
    monkeypatch.setenv(hardware.TRITON, "")
    monkeypatch.delenv(hardware.TRITON)


@pytest.mark.parametrize(
    ("compilers", "variable", "expected"),
    [
        (["gcc", "clang"], None, "gcc"),
        (["clang"], None, "clang"),
        (["cc"], None, None),
        (["gcc", "mine"], "mine", "mine"),
        (["gcc"], "gone", None),
    ],
)
def test_the_c_compiler_is_the_one_that_triton_uses(
    tmp_path, monkeypatch, compilers, variable, expected
):
    for name in compilers:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if variable is not None:
        monkeypatch.setenv("CC", variable)
    path = hardware.find_program("C compiler")
    assert path == (None if expected is None else str(tmp_path / expected))


def test_without_a_compiler_or_headers_triton_is_not_started(tmp_path, monkeypatch, unasked):
    monkeypatch.setattr(hardware, "run_kernel", lambda: pytest.fail("it cannot compile"))
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    assert "Python.h" in hardware.ask_triton() and "python3-dev" in hardware.triton_failure()
    monkeypatch.delenv(hardware.TRITON)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert (
        "C compiler" in hardware.ask_triton()
        and "apt-get install gcc python3-dev" in hardware.triton_failure()
    )


def test_triton_is_asked_once_for_all_processes_that_a_process_starts(monkeypatch, unasked):
    answers = iter(["A small kernel failed"])
    monkeypatch.setattr(hardware, "run_kernel", lambda: next(answers))
    assert hardware.triton_failure() == ""
    assert hardware.ask_triton() == hardware.ask_triton() == "A small kernel failed"
    with pytest.raises(ResourceError, match="A small kernel failed. Or write `x: auto`"):
        hardware.require_triton("`x`", instead="`x: auto`")


@pytest.mark.heavy
def test_a_kernel_that_works_is_no_failure(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert hardware.run_kernel("cpu") == ""


FAKE_TORCH = (
    "import numpy\nones = lambda number, device: numpy.ones(number)\nzeros_like = numpy.zeros_like"
)
FAKE_TRITON = """
class Launched:
    def __init__(self, function): pass
    def __getitem__(self, grid): return self.run
    def run(self, numbers, total, size): {does}
jit = Launched
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("does", "failure"),
    [
        ("total += 63", "it computed 63.0 instead of 64"),
        ("raise RuntimeError('no libcuda.so')", "RuntimeError: no libcuda.so"),
        (
            "import os, sys; os.system('echo x.c:5: fatal error: Python.h >&2'); sys.exit(1)",
            "fatal error: Python.h",
        ),
        ("import os; os.kill(os.getpid(), 11)", "exit code -11"),
        ("import time; time.sleep(60)", "did not end in 3 s"),
    ],
)
def test_a_wrong_value_an_error_a_crash_and_a_hang_are_failures(
    tmp_path, monkeypatch, does, failure
):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(FAKE_TRITON.format(does=does))
    (tmp_path / "triton" / "language.py").write_text("constexpr = None")
    (tmp_path / "torch.py").write_text(FAKE_TORCH)  # torch takes seconds to import
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert failure in hardware.run_kernel("cpu", seconds=3 if "sleep" in does else 60)
