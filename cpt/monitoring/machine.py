"""What else the run does to its machine: memory of the host, processor, disks, network."""

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.hardware import GIB
from cpt.monitoring.pace import Pace

MIB = 2**20
IDLE = ("idle", "iowait", "steal")  # time in which no process of this machine computed
COUNTED_TWICE = ("guest", "guest_nice")  # Linux adds it to user and nice as well


@dataclass(frozen=True)
class Counters:
    """Of the whole machine, since it was switched on."""

    at: float
    processor_seconds: float
    busy_seconds: float
    bytes: dict[str, int]
    """By figure; without disks where a container hides them."""


class MachineUse(TrainerCallback):
    """Adds `host_memory_gib`, `cpu_percent` and the rates of disks and network to logs of the training loss.

    Rates are means since the last look. The main process looks, at each log that is far enough from the last one (see
    `Pace`).
    """

    def __init__(self) -> None:
        self.pace = Pace()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What was before is not the run's."""
        self.before = read_counters()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look, and add what is seen."""
        if "loss" in kwargs["logs"] and state.is_world_process_zero:
            kwargs["logs"].update(self.pace.look(self.figures) or {})

    def figures(self) -> dict[str, float]:
        """Of this moment, and since the last."""
        before, self.before = self.before, read_counters()
        return {
            "host_memory_gib": round(memory_of_processes(psutil.Process()) / GIB, 3),
            **use_between(before, self.before),
        }


def use_between(before: Counters, after: Counters) -> dict[str, float]:
    """Share of all cores that computed, and MiB a second."""
    seconds, processor = after.at - before.at, after.processor_seconds - before.processor_seconds
    figures = (
        {"cpu_percent": round(100 * (after.busy_seconds - before.busy_seconds) / processor, 1)}
        if processor > 0
        else {}
    )
    rates = (
        {name: (number - before.bytes.get(name, number)) / MIB / seconds for name, number in after.bytes.items()}
        if seconds > 0
        else {}
    )
    return figures | {name: round(rate, 3) for name, rate in rates.items()}


def read_counters() -> Counters:
    """The system's own."""
    times = {name: seconds for name, seconds in psutil.cpu_times()._asdict().items() if name not in COUNTED_TWICE}
    total = sum(times.values())
    disk, network = psutil.disk_io_counters(), psutil.net_io_counters()
    counted: dict[str, int] = {}
    if disk is not None:
        counted |= {"disk_read_mib_per_second": disk.read_bytes, "disk_written_mib_per_second": disk.write_bytes}
    if network is not None:
        counted |= {
            "network_received_mib_per_second": network.bytes_recv,
            "network_sent_mib_per_second": network.bytes_sent,
        }
    return Counters(time.monotonic(), total, total - sum(times.get(name, 0.0) for name in IDLE), counted)


def memory_of_processes(top: psutil.Process) -> int:
    """Bytes that a process and those below it have in memory; pages that several share count for each."""
    total: int = top.memory_info().rss
    for process in top.children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_info().rss
    return total
