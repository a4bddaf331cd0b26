"""A run as processes of its own: the words that start it, and how all of them are ended; needs no torch."""

import ctypes
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from cpt.errors import LaunchError
from cpt.hardware import count_cpu_cores, find_gpus

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
SUPERVISED = (  # in the environment of all processes that were started to be watched: who watches, by process number
    "CPT_SUPERVISED"
)
MOST_LOOKS = 10
MOST_RESTARTS = 10  # of a supervised run, in an hour
BY_THE_LAUNCHER = 'with --launcher, which sets it itself: --launcher "torchrun --nproc-per-node 2"'
PROCESSES_OF_A_CORE = 4  # on a CPU; more of them only wait for each other
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
LIBC = ctypes.CDLL(None)
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def command_of_attempt(
    arguments: Sequence[str], processes: int, launcher: str | None, program: Path = TRAIN
) -> list[str]:
    """The words that start a run.

    Args:
        arguments: of cpt/train.py.
        processes: on this machine.
        launcher: words of another launcher, such as `accelerate launch --config_file launch/x.yaml`.
        program: started instead of cpt/train.py.
    """
    if launcher is not None:
        return [*shlex.split(launcher), str(program), *arguments]
    if processes == 1:
        return [sys.executable, str(program), *arguments]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [*torchrun, str(program), *arguments]


def names_several_hosts(launcher: str) -> bool:
    """Whether a launcher's words start one host's part of a run, as `torchrun --nnodes 2` or `deepspeed --no_ssh`
    do."""
    counts = re.findall(r"--(?:nnodes|num[_-]machines)[= ](\S+)", launcher)
    return "--no_ssh" in launcher.split() or any(count.split(":")[-1] != "1" for count in counts)


def kill_family(pid: int, mark: str | None = None) -> None:
    """End a process, its session and all below it, at once.

    torchrun starts its processes in sessions of their own, which outlive it when it is killed: they are found by
    CPT_SUPERVISED in their environment.

    Args:
        mark: what stands there; by default this process's number.
    """
    send(pid, signal.SIGKILL)
    for _ in range(MOST_LOOKS):  # a process that is just becoming another program shows no environment for a moment
        family = marked(mark or str(os.getpid()))
        if not family:
            return
        for process in family:
            send(process.pid, signal.SIGKILL)
        psutil.wait_procs(family, timeout=30)


def marked(mark: str) -> list[psutil.Process]:
    """All processes that have it, but this one and those that are dead already."""
    family = []
    for process in psutil.process_iter():
        try:
            is_of_it = process.pid != os.getpid() and process.environ().get(SUPERVISED) == mark
            if is_of_it and process.status() != psutil.STATUS_ZOMBIE:
                family.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return family


def send(pid: int, number: int) -> None:
    """A signal, if the process is still there."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def refuse_more_than_the_machine_holds(processes: int, *, on_gpus: bool) -> None:
    """Each would take a GPU, or a part of a core and gigabytes of memory.

    Raises:
        LaunchError: there are not so many.
    """
    gpus = len(find_gpus()) if on_gpus else 0
    most = gpus or PROCESSES_OF_A_CORE * count_cpu_cores()
    if processes > most:
        held = f"{gpus} GPUs" if gpus else f"{count_cpu_cores()} cores"
        raise LaunchError(f"--processes {processes}: this machine has {held}. Say at most {most}.")


def die_with_parent() -> None:
    """In a new process, before its program starts: have the system send SIGTERM when the process that watches it is
    killed."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
