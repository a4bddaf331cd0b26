"""Add what the run uses of its machine to each log: memory, CPU, and the state of the GPU."""

import importlib.util
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.hardware import GIB
from cpt.runs.heartbeats import read_heartbeats

SECONDS_BETWEEN_LOOKS = 30.0  # at processes, NVML and heartbeats: each takes some milliseconds
PEAK = "gpu_memory_peak_gib"


class MachineUse(TrainerCallback):
    """Adds GPU memory to each log of the training loss, and the other figures every 30 seconds.

    `gpu_memory_allocated_gib` and `gpu_memory_reserved_gib` are the main process's at this moment; the peak is the
    largest of all processes, from their heartbeats. `cpu_percent` is the mean of the whole machine since the last
    look. NVML gives the GPU's temperature, power and utilization.

    Args:
        run: the run's folder, with the heartbeats.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.next_look = -math.inf
        self.largest_peak = 0.0
        self.has_nvml = importlib.util.find_spec("pynvml") is not None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        psutil.cpu_percent()  # the next call returns the mean since this one

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" not in logs or not state.is_world_process_zero:
            return
        has_gpu = args.device.type == "cuda"
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
            memory = round(resident_bytes(psutil.Process()) / GIB, 3)
            logs.update({"host_memory_gib": memory, "cpu_percent": psutil.cpu_percent()})
            if has_gpu:
                logs.update(self.gpu_state())
                self.largest_peak = max(self.largest_peak, peak_of_others(self.run, args.world_size))
        if has_gpu:
            logs.update(gpu_memory())
            logs[PEAK] = max(logs[PEAK], self.largest_peak)

    def gpu_state(self) -> dict[str, float]:
        """Empty if NVML does not answer, as in some containers and on parts of a GPU; then it is not asked again."""
        if not self.has_nvml:
            return {}
        from pynvml import NVMLError

        try:
            return {
                "gpu_temperature_celsius": torch.cuda.temperature(),
                "gpu_power_watts": torch.cuda.power_draw() / 1000,
                "gpu_utilization_percent": torch.cuda.utilization(),
            }
        except (NVMLError, RuntimeError):
            self.has_nvml = False
            return {}


def resident_bytes(top: psutil.Process) -> int:
    """Memory of a process and its children; pages that several share count for each."""
    total: int = top.memory_info().rss
    for process in top.children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_info().rss
    return total


def gpu_memory() -> dict[str, float]:
    """Memory of this process's GPU, without a synchronization."""
    figures = torch.cuda.memory_stats()
    return {
        "gpu_memory_allocated_gib": round(figures.get("allocated_bytes.all.current", 0) / GIB, 3),
        "gpu_memory_reserved_gib": round(figures.get("reserved_bytes.all.current", 0) / GIB, 3),
        PEAK: round(figures.get("allocated_bytes.all.peak", 0) / GIB, 3),
    }


def peak_of_others(run: Path, processes: int) -> float:
    """The largest peak in the heartbeats; those of higher ranks are of an earlier start."""
    return max((sign.gpu_peak_gib or 0.0 for sign in read_heartbeats(run) if sign.rank < processes), default=0.0)
