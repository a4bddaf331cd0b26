"""`cpt doctor`: what this machine has, what each missing piece costs, and the line that installs it."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import typer
from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cpt.hardware import INSTALL_LINES, Machine, describe_machine

SMALL_SHARED_MEMORY_GIB = 1
SMALL_DISK_GIB = 20
EXTRAS = {  # package -> (what is missing without it, install line)
    "tensorboard": ("curves in TensorBoard", "pip install tensorboard"),
    "wandb": ("curves in Weights & Biases", "pip install wandb"),
    "trackio": ("curves in Trackio", "pip install trackio"),
    "liger_kernel": ("Liger's kernels: less memory for logits (`training.use_liger_kernel`)", "pip install liger-kernel"),
    "matplotlib": ("pictures (`cpt mixture --plot`)", "pip install matplotlib"),
    "bitsandbytes": ("8-bit optimizers, 4-bit weights", "pip install bitsandbytes"),
}
FOR_GPUS = {
    "flash_attn": ("FlashAttention 2: packed rows run through sdpa with a mask, slower", "pip install flash-attn --no-build-isolation"),
    "flash_attn_interface": ("FlashAttention 3, for Hopper GPUs", "build hopper/ of github.com/Dao-AILab/flash-attention"),
    "mamba_ssm": ("Mamba kernels: Nemotron-H and Mamba run many times slower", "pip install mamba-ssm --no-build-isolation"),
    "causal_conv1d": ("Mamba kernels, the convolution", "pip install causal-conv1d --no-build-isolation"),
}


@dataclass(frozen=True)
class Finding:
    """One row of the table."""

    part: str
    here: str
    costs: str = ""
    """What it costs that this is missing or small; empty when nothing is."""
    remedy: str = ""
    broken: bool = False
    """Nothing runs without it."""


def command() -> None:
    """Show what this machine has."""
    raise typer.Exit(run_doctor())


def run_doctor(folder: Path = Path()) -> int:
    """Print the table; the exit code is 2 when something that cpt cannot run without is missing.

    Args:
        folder: whose disk is meant.
    """
    findings = list(examine(describe_machine(folder)))
    table = Table("part", "here", "what that costs", "remedy", title="This machine")
    for finding in findings:
        style = "red" if finding.broken else "yellow" if finding.costs else None
        table.add_row(*map(escape, (finding.part, finding.here, finding.costs, finding.remedy)), style=style)
    Console().print(table)
    return 2 if any(finding.broken for finding in findings) else 0


def examine(machine: Machine) -> Iterator[Finding]:
    """All rows: the machine, then what is installed on it."""
    yield from examine_gpus(machine)
    yield from examine_torch(bool(machine.gpus))
    yield from examine_programs(machine)
    yield from examine_room(machine)
    yield from examine_stack()
    if machine.gpus:
        yield from (examine_package(name, *told) for name, told in FOR_GPUS.items())
    yield from (examine_package(name, *told) for name, told in EXTRAS.items())


def examine_gpus(machine: Machine) -> Iterator[Finding]:
    """One row per GPU."""
    for number, gpu in enumerate(machine.gpus):
        memory = f"{gpu.memory_gib:.1f} GiB ({gpu.free_gib:.1f} free)"
        yield Finding(f"GPU {number}", f"{gpu.name}, {memory}, compute capability {gpu.compute_capability}, driver {gpu.driver}")
    if not machine.gpus:
        yield Finding("GPU", "none (nvidia-smi shows none)", "training runs on the CPU: enough for the demo, not for real models")


def examine_torch(has_gpu: bool) -> Iterator[Finding]:
    """The build of torch, and the attention that it brings."""
    try:
        import torch  # here, so that a broken install is a row of the table
    except (ImportError, OSError) as problem:
        yield Finding("torch", f"cannot be imported: {problem}", "nothing runs", "make setup", broken=True)
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if has_gpu and not torch.cuda.is_available():
        reason = "the driver is too old for it" if torch.version.cuda else "it is the CPU build"
        yield Finding(
            "torch", f"{torch.__version__} ({build})", f"the GPU is not used: {reason}", "pip install --upgrade 'torch>=2.11'", broken=True
        )
    else:
        yield Finding("torch", f"{torch.__version__} ({build})")
    yield Finding("attention: sdpa", "in torch")
    if has_gpu:
        varlen = importlib.util.find_spec("torch.nn.attention.varlen") is not None
        yield Finding(
            "attention: varlen_attn",
            "in torch" if varlen else "missing",
            "" if varlen else "no packing without a mask",
            "" if varlen else "torch>=2.11",
        )


def examine_programs(machine: Machine) -> Iterator[Finding]:
    """Compilers: DeepSpeed compiles at the first use."""
    costs = {
        "g++": "DeepSpeed on a CPU, and its optimizer offload, cannot be compiled",
        "ninja": "the same as without g++",
        "nvcc": "flash-attn and Mamba kernels cannot be compiled; ready-made wheels work",
    }
    for name, place in machine.programs.items():
        if name != "nvcc" or machine.gpus:
            remedy = INSTALL_LINES.get(name, "apt-get install nvidia-cuda-toolkit")
            yield Finding(name, place) if place else Finding(name, "missing", costs[name], remedy)


def examine_room(machine: Machine) -> Iterator[Finding]:
    """Cores, memory and disk."""
    yield Finding("CPU cores", str(machine.cpu_cores))
    yield Finding("host memory", f"{machine.host_memory_gib:.1f} GiB ({machine.free_host_memory_gib:.1f} free)")
    shared = machine.shared_memory_gib
    if shared is None or shared < SMALL_SHARED_MEMORY_GIB:
        here = "none" if shared is None else f"{shared:.2f} GiB"
        yield Finding("shared memory", here, "data workers and NCCL may die with `bus error`", "docker run --shm-size=8g, or --ipc=host")
    else:
        yield Finding("shared memory", f"{shared:.1f} GiB")
    small = machine.free_disk_gib < SMALL_DISK_GIB
    yield Finding(
        "free disk here",
        f"{machine.free_disk_gib:.1f} GiB",
        "a checkpoint of 1B parameters takes about 11 GiB (an estimate)" if small else "",
    )


def examine_stack() -> Iterator[Finding]:
    """The packages that cpt cannot do without, and whether they are new enough."""
    for line in metadata.requires("cpt") or []:
        requirement = Requirement(line)
        if requirement.marker is not None or requirement.name == "torch":
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield Finding(requirement.name, "missing", "cpt cannot run", f"pip install '{line}'", broken=True)
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        yield (
            Finding(requirement.name, version)
            if fits
            else Finding(requirement.name, version, f"cpt needs {line}", f"pip install '{line}'", broken=True)
        )


def examine_package(name: str, missing: str, remedy: str) -> Finding:
    """An optional package; the name is the one that is imported."""
    if importlib.util.find_spec(name) is None:
        return Finding(name, "missing", missing, remedy)
    names = metadata.packages_distributions().get(name, [])
    return Finding(name, metadata.version(names[0]) if names else "installed")
