"""Refuse a launch that silently becomes one process.

`accelerate launch` starts a single process, with exit code 0 and no warning, when its config says MULTI_CPU or when
`--cpu` stands beside several processes or DeepSpeed. The child's environment tells nothing: only the launcher's
command line and its config file do. The same happens under `mpirun` and `srun`, where each process believes to be
alone.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import psutil
from accelerate.commands.config.config_args import ClusterConfig, default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType

from cpt.errors import LaunchError
from cpt.shipped import training_program

COUNTS_OF_OTHERS = {  # variable that a starter without torch's RANK sets -> what it is called
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def refuse_lost_processes() -> None:
    """Check that as many processes run as were asked for.

    Raises:
        LaunchError: there is one process where the launcher was told to start several, or to use DeepSpeed.
    """
    if "RANK" in os.environ:
        return
    for variable, starter in COUNTS_OF_OTHERS.items():
        count = os.environ.get(variable, "1")
        if count.isdigit() and int(count) > 1:
            raise LaunchError(
                f"{starter} started {count} processes, but without RANK and WORLD_SIZE each of them would train alone."
                f" Start one launcher per host instead: torchrun --nnodes N --nproc_per_node M {training_program()}"
                " RECIPE"
            )
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # inherited from `accelerate launch`
        for command_line in launcher_command_lines():
            refuse_lost_accelerate(command_line)


def launcher_command_lines() -> list[list[str]]:
    """The arguments of each `accelerate launch` among this process's ancestors, the nearest first."""
    command_lines = []
    for ancestor in psutil.Process().parents():
        try:
            words = ancestor.cmdline()
        except (psutil.AccessDenied, psutil.NoSuchProcess):  # another user's process, or gone meanwhile
            continue
        if arguments := arguments_of_accelerate(words):
            command_lines.append(arguments)
    return command_lines


def arguments_of_accelerate(words: Sequence[str]) -> list[str]:
    """What follows `accelerate launch`, `accelerate-launch` or `-m accelerate.commands.launch` in a command line."""
    for place, word in enumerate(words[:4]):
        name = Path(word).name
        if name == "accelerate" and list(words[place + 1 : place + 2]) == ["launch"]:
            return list(words[place + 2 :])
        if (
            name == "accelerate-launch"
            or word == "accelerate.commands.launch"
            or word.endswith("accelerate/commands/launch.py")
        ):
            return list(words[place + 1 :])
    return []


def refuse_lost_accelerate(command_line: Sequence[str]) -> None:
    """Compare what accelerate was told with the single process that this is."""
    asked = launch_command_parser().parse_args(list(command_line))
    config = read_config(asked.config_file, asked.cpu)
    processes = asked.num_processes or (config.num_processes if config else 1) or 1
    wants_deepspeed = asked.use_deepspeed or (
        config is not None
        and config.distributed_type == DistributedType.DEEPSPEED
        and not (asked.multi_gpu or asked.use_fsdp)
    )
    where = f" ({asked.config_file or default_config_file})" if config else ""
    if processes > 1:
        raise LaunchError(
            f"accelerate was told to start {processes} processes{where}, but started one: on the CPU it needs"
            " `distributed_type: MULTI_GPU` with `use_cpu: false` (see launch/cpu_2_processes.yaml), never MULTI_CPU"
            f" nor --cpu. Or: torchrun --nproc_per_node {processes} {training_program()} RECIPE"
        )
    if wants_deepspeed:
        raise LaunchError(
            f"accelerate was told to use DeepSpeed{where}, but does not: --cpu turns it off. "
            "Leave --cpu out; without a GPU DeepSpeed runs on the CPU by itself."
        )


def read_config(path: str | None, cpu: bool) -> ClusterConfig | None:
    """The config that `accelerate launch` reads: the one it is given, else its default file unless --cpu is given."""
    if path is None and (cpu or not Path(default_config_file).is_file()):
        return None
    config = load_config_from_file(path)
    return config if isinstance(config, ClusterConfig) else None
