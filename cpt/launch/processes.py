"""Join the run's processes: what the launcher did not set up is set up here, before the model is built."""

import logging
import os
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpt.errors import LaunchError, ResourceError
from cpt.hardware import Gpu, announce_compiling, find_gpus, require_programs, scripts_folder
from cpt.hf_internals import run_exit_functions
from cpt.launch.agreement import agree_with_launcher
from cpt.process import free_port
from cpt.ranks import is_main_process, leave, rank, world_size

log = logging.getLogger(__name__)

WITHOUT_PEER_TO_PEER = "RTX 40"  # NCCL hangs or fails between such cards unless it is told not to try
OF_LAUNCHERS = (  # prefixes of the variables of a launcher and of a process among others
    *("RANK", "LOCAL_RANK", "GROUP_", "ROLE_", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "CROSS_"),
    *("TORCHELASTIC_", "TORCH_NCCL_", "ACCELERATE_", "FSDP_", "PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_"),
    "SLURM_STEP_NUM_TASKS",
)
DEFAULT_TIMEOUT_SECONDS = 1800  # of TrainingArguments.ddp_timeout


@dataclass(frozen=True)
class LaunchedAs:
    """How this run was started."""

    on_cpu: bool
    """Train on the CPU: no accelerator here, or the recipe says so."""
    deepspeed_config: str | dict[str, Any] | None
    """What `TrainingArguments.deepspeed` must be: from the recipe, or from accelerate's config."""
    timeout: timedelta
    """How long a process waits for the others."""


def join_processes(training: Mapping[str, Any]) -> LaunchedAs:
    """Make this process part of the run; call it before anything of the model or the data, and `start_deepspeed` after
    the checks.

    Args:
        training: the recipe's `training:` section.

    Raises:
        LaunchError: the processes do not know each other, or the launcher contradicts the recipe.
        ResourceError: DeepSpeed, or the compilers that it needs here, are missing.
    """
    deepspeed_config = agree_with_launcher(training)
    on_cpu = (
        bool(training.get("use_cpu"))
        or os.environ.get("ACCELERATE_USE_CPU") == "True"
        or not torch.cuda.is_available()
    )
    timeout = timedelta(seconds=training.get("ddp_timeout", DEFAULT_TIMEOUT_SECONDS))
    quiet_known_noise()
    if on_cpu:
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # accelerate asks DeepSpeed for its device even where it is not used
    else:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        turn_off_missing_links(find_gpus())
    if deepspeed_config is not None:
        prepare_deepspeed(on_cpu)
    if deepspeed_config is not None or training.get("fsdp"):
        join_alone()
    if deepspeed_config is not None or training.get("fsdp") or world_size() > 1:
        start_process_group(on_cpu, timeout)
    return LaunchedAs(on_cpu, deepspeed_config, timeout)


def quiet_known_noise() -> None:
    """torch warns hundreds of times that DeepSpeed calls collectives by their old names, and that others call others
    by theirs."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
    warnings.filterwarnings(
        "ignore", category=FutureWarning, message=r".*torch\.distributed\.(reduce_scatter_tensor|_?all_gather).*"
    )
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*gradient_checkpointing` is deprecated.*")
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*`broadcast_buffers` is deprecated.*")


def turn_off_missing_links(gpus: list[Gpu]) -> None:
    """Tell NCCL what two or more RTX 4090 lack; `accelerate launch` does so by itself, torchrun and deepspeed do
    not."""
    if len(gpus) < 2 or not any(WITHOUT_PEER_TO_PEER in gpu.name for gpu in gpus):
        return
    for variable in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
        if variable not in os.environ:
            os.environ[variable] = "1"
            log.info("%s=1: cards of the RTX 40 series have no peer-to-peer.", variable)


def prepare_deepspeed(on_cpu: bool) -> None:
    """What DeepSpeed expects to find before it is imported: its device and a compiler."""
    if on_cpu:
        require_programs("g++", "ninja", reason="DeepSpeed on a CPU compiles its communication")
    if not shutil.which("ninja"):  # torch looks for it on the PATH only, where a virtual environment may be missing
        os.environ["PATH"] = f"{scripts_folder()}{os.pathsep}{os.environ.get('PATH', '')}"


def join_alone() -> None:
    """What a launcher would have told a single process: engines that shard want a group, though it be of one."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if "RANK" not in os.environ:
        alone["MASTER_PORT"] = str(free_port())
    for variable, value in alone.items():
        os.environ.setdefault(variable, value)


def start_process_group(on_cpu: bool, timeout: timedelta) -> None:
    """Connect the processes: gloo for what lies in host memory, NCCL for the GPUs."""
    if dist.is_initialized():
        return
    try:
        dist.init_process_group("gloo" if on_cpu else "cpu:gloo,cuda:nccl", timeout=timeout)
    except (dist.DistNetworkError, dist.DistStoreError, ValueError) as problem:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LaunchError(
            f"process {rank()} of {world_size()} did not meet the others at {address}: {problem}"
        ) from problem


def start_deepspeed(launched: LaunchedAs) -> None:
    """Let DeepSpeed know the processes, before the model is built: ZeRO-3 would build it for a world of one.

    It compiles its communication here when it is first used, tens of seconds that a recipe with mistakes should not
    cost.

    Raises:
        ResourceError: DeepSpeed cannot be imported.
    """
    if launched.deepspeed_config is None:
        return
    try:
        import deepspeed  # reads DS_ACCELERATOR when it is imported
    except ImportError as problem:
        raise ResourceError(
            f"the recipe uses DeepSpeed, which cannot be imported: {problem}. Install it: pip install deepspeed"
        ) from problem
    backend = "gloo" if launched.on_cpu else "nccl"
    if launched.on_cpu and is_main_process():
        announce_compiling("deepspeed_shm_comm", "DeepSpeed compiles its communication for the CPU")
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=launched.timeout, verbose=False)


def leave_processes(then: Sequence[str] = ()) -> None:
    """End this process of a run that went well, together with the others; it does not return where the run had a
    process group.

    Args:
        then: module and words that the main process goes on with, alone: as a new program in its place, so that the
            GPU is free, and its launcher waits for it.
    """
    if not dist.is_initialized():
        return
    dist.barrier()
    if not then or not is_main_process():
        leave(0)
    run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2:  # the new program would hold sockets and devices; closed here, threads that wait would fail
            with suppress(OSError):
                os.set_inheritable(number, False)
    os.execve(sys.executable, [sys.executable, "-m", *then], environment_alone())


def environment_alone() -> dict[str, str]:
    """The environment without what makes a process one of several; with this package where it was started from its
    repository."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
    here = str(Path(__file__).resolve().parents[2])
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, [here, kept.get("PYTHONPATH")]))}
