"""Detect this machine's GPUs, memory, disk, cores and compilers, and whether its GPUs can run torch and Triton."""

import ctypes
import mmap
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from cpt.errors import ResourceError
from cpt.formatting import GIB

if TYPE_CHECKING:
    import torch

CGROUP_MEMORY_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
CGROUP_USED = re.compile(
    r"^(?:anon|shmem|total_rss) (\d+)", re.MULTILINE
)  # in memory.stat; other pages are freed
CGROUP_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
SHARED_MEMORY = Path("/dev/shm")
NOISE = re.compile(r"NVIDIA|GEFORCE|TESLA|SXM\d?|HBM\de?|GIB|GB|[^A-Z0-9]")  # in the names of GPUs
C_COMPILER = "C compiler"
PYTHON_HEADER = "Python.h"
COMPILER_LINE = "apt-get install gcc python3-dev"
INSTALL_LINES = {
    "g++": "apt-get install g++",
    "ninja": "pip install ninja",
    C_COMPILER: COMPILER_LINE,
    PYTHON_HEADER: f"{COMPILER_LINE}, or use a Python with headers, such as uv's (uv python install)",
    "nvcc": "only to compile flash-attn or Mamba kernels yourself: the CUDA toolkit of torch's CUDA version, from"
    " https://developer.nvidia.com/cuda-toolkit-archive (a distribution's package is of another version)",
}
OLDEST_DRIVERS = {
    12: 525,
    13: 580,
}  # CUDA of the torch build: docs.nvidia.com/deploy/cuda-compatibility
CUDNN_ATTENTION = (
    12.9  # CUDA from which torch's wheels have it: github.com/pytorch/pytorch/issues/171627
)
TRITON = "CPT_TRITON_FAILURE"  # in the environment, for the processes that this one starts


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU as its driver describes it."""

    name: str
    memory_gib: float
    free_gib: float
    driver: str
    compute_capability: str


@dataclass(frozen=True)
class GpuType:
    """Data-sheet speeds of a kind of GPU: dense matrices, fp32 accumulation. Data sheets also list twice that, for
    sparse matrices."""

    name: str
    memory_gib: float
    peak_tflops: float
    """In bfloat16; float16 has the same."""
    fp32_tflops: float | None = None
    """In float32, outside of tensor cores; None if unknown."""
    tf32_tflops: float | None = None
    """In float32 rounded to 10 bits in tensor cores: `training.tf32`."""
    bandwidth_gb: float | None = None
    """Memory bandwidth: 10^9 bytes per second, read and written."""
    compute_capability: str | None = None

    def tflops(self, precision: str) -> float | None:
        return {"half": self.peak_tflops, "tf32": self.tf32_tflops, "fp32": self.fp32_tflops}[
            precision
        ]


GPU_TYPES = (
    GpuType("RTX 3090", 24, 71, 35.6, 35.6, 936, "8.6"),
    GpuType("RTX 4080", 16, 97.5, 48.7, 48.7, 717, "8.9"),
    GpuType("RTX 4090", 24, 165.2, 82.6, 82.6, 1008, "8.9"),
    GpuType("RTX 5090", 32, 209.5, 104.8, 104.8, 1792, "12.0"),
    GpuType("RTX A6000", 48, 154.8, 38.7, 77.4, 768, "8.6"),
    GpuType("RTX 6000 Ada", 48, 364.2, 91.1, 182.1, 960, "8.9"),
    GpuType("A10G", 24, 70, 35, 35, 600, "8.6"),
    GpuType("A100-40GB", 40, 312, 19.5, 156, 1555, "8.0"),
    GpuType("A100-80GB", 80, 312, 19.5, 156, 2039, "8.0"),
    GpuType("H100", 80, 989.4, 66.9, 494.7, 3350, "9.0"),
    GpuType("H100 PCIe", 80, 756, 51.2, 378, 2000, "9.0"),
    GpuType("H200", 141, 989.4, 66.9, 494.7, 4800, "9.0"),
    GpuType("L4", 24, 121, 30.3, 60.5, 300, "8.9"),
    GpuType("L40S", 48, 362, 91.6, 183, 864, "8.9"),
    GpuType("B200", 180, 2250, 75, 1125, 8000, "10.0"),
)


def simplified_gpu(name: str) -> str:
    """`A10080` for `NVIDIA A100-SXM4-80GB`, `RTX4090` for `GeForce RTX 4090`; the only H100 with a size in its name
    has 80 GB."""
    word = NOISE.sub("", name.upper())
    if word == "H10080":
        return "H100"
    if word == "H200141":
        return "H200"
    return word


def known_gpu(name: str) -> GpuType | None:
    """Return the kind of GPU with this driver name; None if the table lacks it."""
    for kind in GPU_TYPES:
        if simplified_gpu(kind.name) == simplified_gpu(name):
            return kind
    return None


@dataclass(frozen=True)
class Machine:
    gpus: list[Gpu]
    cpu_cores: int
    host_memory_gib: float
    free_host_memory_gib: float
    shared_memory_gib: float | None
    """Size of /dev/shm, which data workers and NCCL use."""
    free_disk_gib: float
    programs: dict[str, str | None]
    """Paths; None for a missing one."""
    triton_failure: str
    """Empty if Triton works, or without a GPU."""


def describe_machine(folder: Path = Path()) -> Machine:
    """GPUs, memory, cores and programs; free disk space is measured at `folder`."""
    gpus = find_gpus()
    shared_memory_gib = None
    if SHARED_MEMORY.exists():
        shared_memory_gib = shutil.disk_usage(SHARED_MEMORY).total / GIB
    return Machine(
        gpus=gpus,
        cpu_cores=count_cpu_cores(),
        host_memory_gib=host_memory_gib(),
        free_host_memory_gib=free_host_memory_gib(),
        shared_memory_gib=shared_memory_gib,
        free_disk_gib=free_disk_gib(folder),
        programs={name: find_program(name) for name in INSTALL_LINES},
        triton_failure=ask_triton() if gpus else "",
    )


def find_gpus() -> list[Gpu]:
    """List the driver's NVIDIA GPUs, regardless of CUDA_VISIBLE_DEVICES."""
    if not shutil.which("nvidia-smi"):
        return []
    columns = "--query-gpu=name,memory.total,memory.free,driver_version,compute_cap"
    query = ["nvidia-smi", columns, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []  # a hanging driver or a broken install counts as no GPU
    if answer.returncode != 0:
        return []
    gpus = []
    for line in answer.stdout.splitlines():
        cells = line.split(",")  # NVIDIA H100 80GB HBM3, 81559, 80994, 580.95.05, 9.0
        if len(cells) == 5:
            name, total, free, driver, capability = map(str.strip, cells)
            gpus.append(Gpu(name, mib_in_gib(total), mib_in_gib(free), driver, capability))
    return gpus


def mib_in_gib(cell: str) -> float:
    """Convert MiB to GiB; `[N/A]`, from GPUs with unified memory, counts as 0."""
    if cell.replace(".", "", 1).isdigit():
        return float(cell) / 1024
    return 0.0


def count_cpu_cores() -> int:
    """Number of cores for this process, by its affinity and the container's quota."""
    cores = len(os.sched_getaffinity(0))
    if CGROUP_CPU_LIMIT.exists():
        quota, period = CGROUP_CPU_LIMIT.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def host_memory_gib() -> float:
    """Memory of the host, or of the container if it has less."""
    total: int = psutil.virtual_memory().total
    for file in CGROUP_MEMORY_LIMITS:
        if not file.exists():
            continue
        limit = file.read_text().strip()
        if limit != "max":
            total = min(total, int(limit))
    return total / GIB


def free_host_memory_gib() -> float:
    """Memory that this process can allocate and page-lock: the host's, or what its container's limit leaves.

    `ulimit -l` does not limit memory that CUDA page-locks.
    """
    used = 0
    for limit in CGROUP_MEMORY_LIMITS:
        statistics = limit.with_name("memory.stat")
        if statistics.exists():
            used = sum(map(int, CGROUP_USED.findall(statistics.read_text())))
    return min(psutil.virtual_memory().available / GIB, host_memory_gib() - used / GIB)


def free_disk_gib(folder: Path) -> float:
    """Free space on the disk of `folder`, which need not exist yet."""
    return shutil.disk_usage(nearest_existing(folder)).free / GIB


def nearest_existing(folder: Path) -> Path:
    """`folder`, or the first of its parents that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def find_program(name: str) -> str | None:
    """Find `name` on the PATH, or next to this Python (a virtual environment that is not activated); C compiler and
    Python.h where Triton expects them (triton/runtime/build.py)."""
    if name == C_COMPILER:
        compilers = os.environ.get("CC", "gcc clang").split()
        return next(filter(None, map(shutil.which, compilers)), None)
    if name == PYTHON_HEADER:
        # Debian's own scheme, posix_local, has no headers
        scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
        header = Path(sysconfig.get_path("include", scheme), name)
        if header.exists():
            return str(header)
        return None
    return shutil.which(name) or shutil.which(name, path=scripts_folder())


def announce_compiling(extension: str, message: str) -> None:
    """Announce the compilation of a torch extension, if this machine has never compiled it: it takes minutes without
    output."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", f"{cache}/torch_extensions")).expanduser()
    if not any(folder.rglob(f"{extension}*.so")):
        sys.stderr.write(f"{message}. This takes minutes, once on this machine ...\n")


def require_programs(*names: str, reason: str) -> None:
    """Raise a ResourceError with install lines if programs are missing; `reason` begins its message."""
    missing = [name for name in names if not find_program(name)]
    if missing:
        lines = "; ".join(INSTALL_LINES[name] for name in missing)
        raise ResourceError(
            f"{reason} and needs {' and '.join(missing)}, not found on this machine. Install: {lines}"
        )


def scripts_folder() -> str:
    return sysconfig.get_path("scripts")


# --- torch and Triton on the GPU ---


def torch_problem(gpus: list[Gpu]) -> str | None:
    """Return why torch cannot use these GPUs of this machine, or None."""
    import torch

    for gpu in gpus:
        reason = why_torch_fails(gpu, torch.version.cuda, torch.cuda.get_arch_list())
        if reason is not None:
            return f"torch cannot use {gpu.name}: {reason}"
    if gpus and not torch.cuda.is_available():
        return "torch.cuda.is_available() is false"
    return None


def why_torch_fails(gpu: Gpu, cuda: str | None, architectures: list[str]) -> str | None:
    """Return why a build of torch cannot use the GPU; None if it should work.

    Args:
        cuda: the build's version of CUDA; None for a CPU build.
        architectures: GPUs that the build has code for, such as sm_90; empty if torch finds no GPU.
    """
    if cuda is None:
        return "it is a build for the CPU"
    oldest = OLDEST_DRIVERS.get(int(float(cuda)), 0)
    if int(gpu.driver.partition(".")[0]) < oldest:
        return f"CUDA {cuda} needs driver {oldest} or newer, and the driver is {gpu.driver}"
    number = int(gpu.compute_capability.replace(".", ""))
    fitting = {
        f"sm_{code}" for code in range(number // 10 * 10, number + 1)
    }  # 8.9 runs sm_80, sm_86 and sm_89
    if architectures and fitting.isdisjoint(architectures):
        return f"it has code for {', '.join(architectures)}, not for capability {gpu.compute_capability}"
    return None


def lacks_cudnn_attention(gpu: Gpu, cuda: str | None) -> bool:
    """Whether attention uses FlashAttention-2 on a Hopper GPU, for which cuDNN's is faster."""
    return (
        cuda is not None
        and float(cuda) < CUDNN_ATTENTION
        and gpu.compute_capability.startswith("9.")
    )


def ask_triton() -> str:
    """Try to compile and run a kernel with Triton, once for this process and those that it starts; return the failure,
    as `triton_failure` does from now on.

    Triton compiles the kernels of the loss, of AdamW and of `torch_compile`. Asking takes one more import
    of torch, and the time to compile.
    """
    if TRITON not in os.environ:
        try:
            # Triton's cache may hide that they are missing, until another kernel needs them.
            require_programs(C_COMPILER, PYTHON_HEADER, reason="Triton compiles kernels")
            os.environ[TRITON] = run_kernel()
        except ResourceError as missing:
            os.environ[TRITON] = str(missing)
    return triton_failure()


def triton_failure() -> str:
    """Return why Triton does not work on this machine; empty if it does, or if `ask_triton` was not called."""
    return os.environ.get(TRITON, "")


def require_triton(reason: str, *, instead: str) -> None:
    """Raise a ResourceError if `ask_triton` failed; `reason` begins its message, `instead` is what to write."""
    failure = triton_failure()
    if failure:
        raise ResourceError(
            f"{reason} needs Triton, which does not work here. {failure}. Or write {instead}."
        )


def run_kernel(device: str = "cuda", seconds: float = 180) -> str:
    """Run a kernel in another process, which may crash or hang; return the failure, or an empty text."""
    program = Path(__file__).with_name("triton_probe.py")
    command = [sys.executable, "-P", str(program), device]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"A small kernel did not end in {seconds:.0f} s"
    if answer.returncode == 0:
        return ""
    # the first line: a C compiler's error comes before Python's, which only names its command
    error = re.search(r"^.*error: .*$", answer.stderr, re.IGNORECASE | re.MULTILINE)
    if error is None:
        return f"A small kernel ended with exit code {answer.returncode} (negative: a signal)"
    return f"A small kernel failed: {error.group().strip()}"


SMALL_BLOCK = (
    2**20
)  # bytes; torch's allocator rounds each block up to a power of two, which costs little here


def host_memory(size: int, device: "torch.device") -> "torch.Tensor":
    """Allocate zeroed bytes in host memory for copies from and to the device, page-locked for a GPU.

    Blocks have exactly the requested size: torch's allocator of page-locked memory would nearly double Qwen2.5-7B's
    fp32 matrices. torch.cuda.CudaError if the memory cannot be page-locked, OSError if there is too little.
    """
    import torch

    if device.type != "cuda" or size <= SMALL_BLOCK:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
    memory = mmap.mmap(-1, size)
    cudart = torch.cuda.cudart()
    view = (ctypes.c_char * size).from_buffer(memory)
    buffer = torch.frombuffer(view, dtype=torch.uint8)
    code = int(cudart.cudaHostRegister(buffer.data_ptr(), size, 0))  # type: ignore[attr-defined]
    if code:
        raise torch.cuda.CudaError(code)

    # Keeps `mapped` alive until then: memory is unlocked before it is unmapped.
    def unlock(address: int, mapped: mmap.mmap) -> None:
        cudart.cudaHostUnregister(address)  # type: ignore[attr-defined]

    weakref.finalize(view, unlock, buffer.data_ptr(), memory).atexit = False
    return buffer
