"""What a run ran on: versions, git state, code, machine and command, so that it can be understood and repeated
later."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from cpt.hardware import count_cpu_cores, find_gpus, host_memory_gib
from cpt.ranks import name_of_launcher, world_size

CPU_INFO = Path("/proc/cpuinfo")
PACKAGES = (
    "cpt",
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "peft",
    "trl",
    "datasets",
    "tokenizers",
    "safetensors",
    "grain",
    "numpy",
    "liger-kernel",
    "flash-attn",
    "bitsandbytes",
    "torchao",
    "pytorch_optimizer",
)
DECIDING_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"),
    *(
        "CUBLAS_",
        "CUDNN_",
        "NVIDIA_TF32",
        "NCCL_",
        "PYTORCH_",
        "TORCH_",
        "TORCHINDUCTOR_",
        "ATEN_",
        "MKL_",
        "DNNL_",
        "ONEDNN_",
    ),
)
"""Variables, or what they begin with, that can change figures or speed; the others are nobody's business, and some are
secret."""
OF_LAUNCHERS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_EXTENSIONS_DIR")
"""Those among them that launchers and build tools set."""


def describe_environment() -> dict[str, Any]:
    """Everything about this start that the recipe does not hold."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "launcher": name_of_launcher(),
        "processes": world_size(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "hardware": describe_hardware(),
        "variables": deciding_variables(),
        "versions": {name: installed_version(name) for name in PACKAGES},
        "code": hash_of_code(),
        "git": git_state(),
    }


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_hardware() -> dict[str, Any]:
    """What can make the same arithmetic give other figures, or take another time."""
    gpus = find_gpus()
    return {
        "processor": name_of_processor(),
        "cores": count_cpu_cores(),
        "host_memory_gib": round(host_memory_gib()),
        "gpus": [gpu.name for gpu in gpus],
        "driver": gpus[0].driver if gpus else None,
    }


@lru_cache
def name_of_processor() -> str:
    lines = CPU_INFO.read_text(errors="replace").splitlines() if CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def deciding_variables() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(DECIDING_VARIABLES) and name not in OF_LAUNCHERS
    }


@lru_cache
def hash_of_code() -> str:
    """xxh3-128 of all source files of this package: git tells nothing of one that was installed, or of files that it
    does not know."""
    package = Path(__file__).resolve().parents[1]
    digest = xxh3_128()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def git_state() -> dict[str, str] | None:
    """Commit and uncommitted changes of the folder that the run was started in; None outside a repository."""
    try:
        commit = git("rev-parse", "HEAD")
        return {"commit": commit.strip(), "changes": git("status", "--porcelain"), "diff": git("diff", "HEAD")}
    except (OSError, subprocess.CalledProcessError):
        return None


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, errors="replace").stdout
