"""`cpt doctor`: what this machine has, what each missing piece costs, and the line that installs it."""

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement
from packaging.version import Version
from rich.markup import escape
from rich.table import Column, Table

from cpt.console import open_console
from cpt.errors import LaunchError
from cpt.hardware import INSTALL_LINES, Gpu, Machine, describe_machine
from cpt.ranks import num_nodes
from cpt.recipe.load import load_recipe
from cpt.versions import (
    CUDAS,
    CXX20_TORCH,
    FOR_ANY_LINE,
    LINES,
    STACK,
    Installed,
    built_for_another_torch,
    minor_of,
    nearest_line,
)

SMALL_SHARED_MEMORY_GIB = 1
SMALL_DISK_GIB = 20
EXTRAS = {  # package -> (what is missing without it, install line)
    "tensorboard": ("curves in TensorBoard", "pip install tensorboard"),
    "wandb": ("curves in Weights & Biases", "pip install wandb"),
    "trackio": ("curves in Trackio", "pip install trackio"),
    "liger_kernel": (
        "Liger's kernels: less memory for logits (`training.use_liger_kernel`)",
        "pip install liger-kernel",
    ),
    "matplotlib": ("pictures of a search and of an evaluation", "pip install matplotlib"),
    "bitsandbytes": ("4-bit weights", "pip install bitsandbytes"),
}
KERNELS = {  # package -> what is missing without it
    "flash-attn": "`model.attention: flash_attention_2`; without it `auto` takes torch's own varlen_attn",
    "mamba-ssm": "Mamba kernels: Nemotron-H and Mamba run many times slower",
    "causal-conv1d": "Mamba kernels, the convolution",
}
FLASH_3 = ("FlashAttention 3, for Hopper GPUs", "build hopper/ of github.com/Dao-AILab/flash-attention")
PAGE = "docs/installing.md"


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


def command(
    recipe: Annotated[Path | None, typer.Argument(help="On several nodes: the recipe that they will train.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")] = None,
) -> None:
    """Show what this machine has, or compare the nodes of a cluster.

    With a recipe, it compares versions, code, recipe and files of all nodes, as a run does before its first step.
    Start it on each node: torchrun --nnodes 2 --node-rank 0 --master-addr host-0 -m cpt doctor recipe.yaml

    Example: cpt doctor
    """
    if recipe is None:
        raise typer.Exit(run_doctor())
    if num_nodes() == 1:
        raise LaunchError(
            "cpt doctor RECIPE compares nodes. Type on each of them, with its own --node-rank: torchrun --nnodes 2"
            f" --node-rank 0 --master-addr FIRST_HOST -m cpt doctor {recipe}"
        )
    from cpt.launchers.nodes import compare_nodes  # imports torch, which the table has to do without
    from cpt.launchers.processes import join_processes, leave_processes

    loaded = load_recipe(recipe, overrides or ())
    join_processes(loaded.training)
    compare_nodes(loaded)
    leave_processes()


def run_doctor(folder: Path = Path()) -> int:
    """Print the table; the exit code is 2 when something that cpt cannot run without is missing.

    Args:
        folder: whose disk is meant.
    """
    findings = list(examine(describe_machine(folder)))
    console = open_console()
    table = Table(
        *(Column(title, overflow="fold") for title in ("part", "here", "what that costs")), title="This machine"
    )
    for finding in findings:
        style = "red" if finding.broken else "yellow" if finding.costs else None
        table.add_row(*map(escape, (finding.part, finding.here, finding.costs)), style=style)
    console.print(table)
    for finding in findings:
        if finding.remedy:  # whole, to be copied
            console.print(f"{finding.part}: {finding.remedy}", markup=False)
    return 2 if any(finding.broken for finding in findings) else 0


def examine(machine: Machine) -> Iterator[Finding]:
    """All rows: the machine, then what is installed on it."""
    yield from examine_gpus(machine)
    yield from examine_torch(bool(machine.gpus))
    installed = what_is_installed()
    if installed is not None:
        yield from examine_versions(installed)
        yield from examine_fit(machine.gpus, installed.cuda)
    yield from examine_programs(machine)
    yield from examine_room(machine)
    yield from examine_stack()
    if machine.gpus and installed is not None:
        yield from (examine_kernel(name, installed) for name in KERNELS)
        yield examine_package("flash_attn_interface", *FLASH_3)
    yield from (examine_package(name, *told) for name, told in EXTRAS.items())


def examine_gpus(machine: Machine) -> Iterator[Finding]:
    """One row per GPU."""
    for number, gpu in enumerate(machine.gpus):
        memory = f"{gpu.memory_gib:.1f} GiB ({gpu.free_gib:.1f} free)"
        yield Finding(
            f"GPU {number}", f"{gpu.name}, {memory}, compute capability {gpu.compute_capability}, driver {gpu.driver}"
        )
    if not machine.gpus:
        yield Finding(
            "GPU", "none (nvidia-smi shows none)", "training runs on the CPU: enough for the demo, not for real models"
        )


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
            "torch",
            f"{torch.__version__} ({build})",
            f"the GPU is not used: {reason}",
            "pip install --upgrade 'torch>=2.11'",
            broken=True,
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


def what_is_installed() -> Installed | None:
    """For the comparison with the lines of versions; None where torch cannot be imported."""
    try:
        import torch  # here, as above
    except (ImportError, OSError):
        return None
    packages = {}
    for name in (*STACK, *FOR_ANY_LINE, *KERNELS):
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return Installed(
        str(torch.__version__), torch.version.cuda, packages, f"{sys.version_info.major}.{sys.version_info.minor}"
    )


def examine_versions(installed: Installed) -> Iterator[Finding]:
    """Whether all versions are those of one line of the page, and which of them are not."""
    line, others = nearest_line(installed)
    if not others:
        ground = (
            "cpt's tests ran with these versions"
            if line.has_run
            else "from what the projects publish; the tests ran on a CPU only"
        )
        yield Finding("versions", f"line `{line.name}` of {PAGE}: {ground}")
    for number, other in enumerate(others):
        costs = (
            f"outside the lines of {PAGE}; nearest: `{line.name}`"
            if number == 0
            else f"`{line.name}` has another one too"
        )
        if other.package == "torch" and installed.cuda and Version(installed.torch) >= CXX20_TORCH:
            costs += "; the newest flash-attn, mamba-ssm and causal-conv1d do not compile for it (C++20)"
        yield Finding(
            f"versions: {other.package}", f"{other.here} (`{line.name}`: {other.there})", costs, other.install_line
        )


def examine_fit(gpus: Sequence[Gpu], cuda: str | None) -> Iterator[Finding]:
    """Whether torch's CUDA has code for these GPUs, and their driver is new enough for it."""
    known = CUDAS.get(cuda or "")
    if known is None:
        return
    for gpu in gpus:
        if not known.has_code_for(gpu.compute_capability):
            there = [
                each for each in reversed(LINES) if each.cuda and CUDAS[each.cuda].has_code_for(gpu.compute_capability)
            ]
            remedy = there[-1].torch_line if there else f"no line of {PAGE} is for this GPU"
            costs = f"torch for CUDA {cuda} has no code for compute capability {gpu.compute_capability}"
            yield Finding(f"{gpu.name} and torch", f"CUDA {cuda}", costs, remedy, broken=True)
        if int(gpu.driver.partition(".")[0]) < known.least_driver:
            costs = f"CUDA {cuda} needs driver {known.least_driver} or newer"
            yield Finding(
                f"{gpu.name} and its driver",
                gpu.driver,
                costs,
                f"a newer driver, or another line of {PAGE}",
                broken=True,
            )


def examine_kernel(package: str, installed: Installed) -> Finding:
    """A package that was compiled for one torch: the line that installs it, and whether it is the torch that is
    here."""
    line, _ = nearest_line(installed)
    wheel = (
        line.wheel(package)
        if line.cuda == installed.cuda and minor_of(line.torch) == minor_of(installed.torch)
        else None
    )
    remedy = (
        wheel.install_line(installed.python)
        if wheel
        else f"nobody is known to build it for torch {installed.torch}: {PAGE}"
    )
    here = installed.packages.get(package)
    if here is None:
        return Finding(package, "missing", KERNELS[package], remedy)
    other = built_for_another_torch(here, installed.torch)
    if other is not None:
        return Finding(
            package, here, f"it was built for torch {other}: its import ends with `undefined symbol`", remedy
        )
    return Finding(package, here)


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
        yield Finding(
            "shared memory",
            here,
            "data workers and NCCL may die with `bus error`",
            "docker run --shm-size=8g, or --ipc=host",
        )
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
    names = installed_packages().get(name, [])
    return Finding(name, metadata.version(names[0]) if names else "installed")


@cache
def installed_packages() -> Mapping[str, list[str]]:
    """Imported name -> packages that have it; it takes a look at every file that was ever installed."""
    return metadata.packages_distributions()
