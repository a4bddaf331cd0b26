"""The command that starts a run in processes of its own; needs no torch."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from cpt.errors import LaunchError
from cpt.hardware import count_cpu_cores, find_gpus

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
MOST_RESTARTS = 10  # of a supervised run, in an hour
BY_THE_LAUNCHER = 'with --launcher, which sets it itself: --launcher "torchrun --nproc-per-node 2"'
PROCESSES_OF_A_CORE = 4  # on a CPU; more of them only wait for each other


def command_of_attempt(
    arguments: Sequence[str], processes: int, launcher: str | None, program: Path = TRAIN
) -> list[str]:
    """The command that starts a run.

    Args:
        arguments: of cpt/train.py.
        processes: on this machine.
        launcher: another launcher's command, such as `accelerate launch --config_file launch/x.yaml`.
        program: started instead of cpt/train.py.
    """
    if launcher is not None:
        return [*shlex.split(launcher), str(program), *arguments]
    if processes == 1:
        return [sys.executable, str(program), *arguments]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [*torchrun, str(program), *arguments]


def names_several_hosts(launcher: str) -> bool:
    """Whether a launcher's command starts one host's part of a run, as `torchrun --nnodes 2` or `deepspeed --no_ssh`
    do."""
    counts = re.findall(r"--(?:nnodes|num[_-]machines)[= ](\S+)", launcher)
    return "--no_ssh" in launcher.split() or any(count.split(":")[-1] != "1" for count in counts)


def refuse_more_than_the_machine_holds(processes: int, *, on_gpus: bool) -> None:
    """Each process would take a GPU, or a part of a core and gigabytes of memory.

    Raises:
        LaunchError: there are not so many.
    """
    gpus = len(find_gpus()) if on_gpus else 0
    most = gpus or PROCESSES_OF_A_CORE * count_cpu_cores()
    if processes > most:
        held = f"{gpus} GPUs" if gpus else f"{count_cpu_cores()} cores"
        raise LaunchError(f"--processes {processes}: this machine has {held}. Use at most {most}.")
