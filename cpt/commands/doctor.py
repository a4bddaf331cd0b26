"""`cpt doctor`: show this machine's hardware and packages, the cost of missing ones, and how to install them."""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement
from rich.markup import escape
from rich.table import Column, Table

from cpt.command_line import Overrides
from cpt.distributed import num_nodes
from cpt.errors import DISTRIBUTION, LaunchError
from cpt.formatting import open_console
from cpt.hardware import (
    C_COMPILER,
    INSTALL_LINES,
    OLDEST_DRIVERS,
    PYTHON_HEADER,
    Gpu,
    Machine,
    describe_machine,
    lacks_cudnn_attention,
    torch_problem,
)
from cpt.recipe.load import load_recipe

SMALL_SHARED_MEMORY_GIB = 1
PAGE = "docs/howto/installing.md"
SET = f"install the set of versions for this driver and GPU: {PAGE}"
FOR_GPUS = (C_COMPILER, PYTHON_HEADER, "nvcc")
LOST_WITHOUT = {
    "g++": "cannot compile layers (`training.torch_compile`), DeepSpeed for the CPU, and its optimizer offload",
    "ninja": "cannot compile DeepSpeed for the CPU and its optimizer offload",
    C_COMPILER: "Triton cannot compile kernels",
    PYTHON_HEADER: "Triton cannot compile kernels",
    "nvcc": "cannot compile flash-attn and Mamba kernels; prebuilt wheels work",
}
WITHOUT_TRITON = (
    "slower: layers are not compiled, the loss uses torch's operations, AdamW gets fp32 weights; refused:"
    " `torch_compile: true`"
)
WHEEL = f"install the wheel for this torch: {PAGE}"
KERNELS = {  # module -> feature that needs it, and how to install it
    "flash_attn": (
        "`model.attention: flash_attention_2`; without it `auto` uses torch's varlen_attn",
        WHEEL,
    ),
    "flash_attn_interface": (
        "FlashAttention 3, for Hopper GPUs",
        "build hopper/ of github.com/Dao-AILab/flash-attention",
    ),
    "mamba_ssm": ("Mamba kernels: without them Nemotron-H and Mamba are many times slower", WHEEL),
    "causal_conv1d": ("Mamba kernels, the convolution", WHEEL),
}


@dataclass(frozen=True)
class Diagnosis:
    part: str
    state: str
    costs: str = ""
    """The effect of a missing or small resource."""
    remedy: str = ""
    is_broken: bool = False
    """Whether cpt cannot run because of it."""


def command(
    recipe: Annotated[
        Path | None, typer.Argument(help="On several nodes: the recipe to train.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Show this machine's hardware and packages, or compare the nodes of a cluster.

    With a recipe, compare versions, code, recipe and files of all nodes, as a run does before its first step.
    Run it on each node: torchrun --nnodes 2 --node-rank 0 --master-addr host-0 -m cpt doctor recipe.yaml

    Example: cpt doctor
    """
    if recipe is None:
        raise typer.Exit(print_machine())
    if num_nodes() == 1:
        raise LaunchError(
            "cpt doctor RECIPE compares nodes. Run it on each by torchrun, as in cpt doctor --help."
        )
    from cpt.distributed import join_processes, leave_processes
    from cpt.launch.nodes import compare_nodes  # torch, without which the table has to work

    loaded = load_recipe(recipe, overrides or ())
    join_processes(loaded.training)
    compare_nodes(loaded)
    leave_processes()


def print_machine() -> int:
    """Print the table; the exit code is 2 if cpt cannot run."""
    diagnoses = list(examine(describe_machine()))
    console = open_console()
    columns = [Column(heading, overflow="fold") for heading in ("part", "here", "effect")]
    table = Table(*columns, title="This machine")
    for diagnosis in diagnoses:
        style = None
        if diagnosis.is_broken:
            style = "red"
        elif diagnosis.costs:
            style = "yellow"
        cells = (diagnosis.part, diagnosis.state, diagnosis.costs)
        table.add_row(*map(escape, cells), style=style)
    console.print(table)
    for diagnosis in diagnoses:
        if diagnosis.remedy:  # untruncated, for copying
            console.print(f"{diagnosis.part}: {diagnosis.remedy}", markup=False)
    return 2 if any(diagnosis.is_broken for diagnosis in diagnoses) else 0


def examine(machine: Machine) -> Iterator[Diagnosis]:
    for number, gpu in enumerate(machine.gpus):
        state = (
            f"{gpu.name}, {gpu.memory_gib:.1f} GiB ({gpu.free_gib:.1f} free),"
            f" compute capability {gpu.compute_capability}, driver {gpu.driver}"
        )
        yield Diagnosis(f"GPU {number}", state)
    if not machine.gpus:
        costs = "training runs on the CPU: enough for the demo, not for real models"
        yield Diagnosis("GPU", "none (nvidia-smi shows none)", costs)
    yield from examine_torch(machine.gpus)
    for name, path in machine.programs.items():
        if path is not None:
            yield Diagnosis(name, path)
        elif machine.gpus or name not in FOR_GPUS:
            yield Diagnosis(name, "missing", LOST_WITHOUT[name], INSTALL_LINES[name])
    if machine.triton_failure:
        yield Diagnosis("Triton", machine.triton_failure, WITHOUT_TRITON)
    elif machine.gpus:
        yield Diagnosis("Triton", "compiled and ran a kernel")
    yield Diagnosis("CPU cores", str(machine.cpu_cores))
    free = f"{machine.free_host_memory_gib:.1f} free, which can be pinned: `ulimit -l` does not limit it"
    yield Diagnosis("host memory", f"{machine.host_memory_gib:.1f} GiB ({free})")
    shared_gib = machine.shared_memory_gib or 0.0
    shared_memory = Diagnosis("shared memory", f"{shared_gib:.2f} GiB")
    if shared_gib < SMALL_SHARED_MEMORY_GIB:
        shared_memory = replace(
            shared_memory,
            costs="data workers and NCCL may fail with `bus error`",
            remedy="docker run --shm-size=8g, or --ipc=host",
        )
    yield shared_memory
    yield Diagnosis("free disk here", f"{machine.free_disk_gib:.1f} GiB")
    yield from examine_stack()
    if machine.gpus:
        yield from map(examine_kernel, KERNELS)


def examine_torch(gpus: list[Gpu]) -> Iterator[Diagnosis]:
    try:
        import torch  # here, so that a broken install becomes a row of the table
    except (ImportError, OSError) as error:
        state = f"cannot be imported: {error}"
        yield Diagnosis("torch", state, "cpt cannot run", "make setup", is_broken=True)
        return
    cuda = torch.version.cuda
    problem = torch_problem(gpus)
    try:
        if gpus and problem is None:
            torch.ones(1, device="cuda").add(1)
    except RuntimeError as error:  # also if other programs fill the GPU
        problem = str(error).splitlines()[0]
    build = f"CUDA {cuda}" if cuda else "CPU build"
    state = f"{torch.__version__} ({build})"
    if problem is not None:
        yield Diagnosis("torch", state, f"the GPU is not used: {problem}", SET, is_broken=True)
        return
    yield Diagnosis("torch", state)
    if any(lacks_cudnn_attention(gpu, cuda) for gpu in gpus):
        costs = "attention of Hopper GPUs is slower, most of all over long rows"
        remedy = (
            f"install torch for CUDA 13.0; it needs driver {OLDEST_DRIVERS[13]} or newer: {PAGE}"
        )
        yield Diagnosis("cuDNN attention", f"missing in torch for CUDA {cuda}", costs, remedy)


def examine_kernel(module: str) -> Diagnosis:
    """Check a package that is compiled for one version of torch and CUDA."""
    feature, remedy = KERNELS[module]
    if importlib.util.find_spec(module) is None:
        return Diagnosis(module, "missing", feature, remedy)
    try:
        imported = importlib.import_module(module)
    except (ImportError, OSError) as problem:  # built for another torch: undefined symbol
        return Diagnosis(module, "installed", f"cannot be imported: {problem}", remedy)
    return Diagnosis(module, getattr(imported, "__version__", "installed"))


def examine_stack() -> Iterator[Diagnosis]:
    for line in metadata.requires(DISTRIBUTION) or []:
        requirement = Requirement(line)
        if requirement.marker is not None or requirement.name == "torch":
            continue
        state = "missing"
        with suppress(metadata.PackageNotFoundError):
            state = metadata.version(requirement.name)
            if requirement.specifier.contains(state, prereleases=True):
                yield Diagnosis(requirement.name, state)
                continue
        remedy = f"pip install '{line}'"
        yield Diagnosis(requirement.name, state, f"cpt needs {line}", remedy, is_broken=True)
