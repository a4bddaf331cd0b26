"""What torch holds of the GPUs' memory."""

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.hardware import GIB
from cpt.monitoring.pace import Pace
from cpt.runs.signs import read_signs

PEAK = "gpu_memory_peak_gib"


class GpuMemory(TrainerCallback):
    """Adds `gpu_memory_allocated_gib` and `gpu_memory_reserved_gib`, of this moment, and `gpu_memory_peak_gib`, since
    the process began.

    The first two are of the main process's GPU. The peak is the largest of all processes, as their heartbeats told it
    a second ago.

    Args:
        run: the run's folder, with the heartbeats.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.pace = Pace()
        self.of_others = 0.0

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add them to logs of the training loss; a CPU has none."""
        if "loss" not in kwargs["logs"] or args.device.type != "cuda" or not state.is_world_process_zero:
            return
        figures = gpu_memory()
        if args.world_size > 1:
            seen = self.pace.look(lambda: self.largest_peak(args.world_size))
            self.of_others = max(self.of_others, seen or 0.0)
        kwargs["logs"].update({**figures, PEAK: max(figures[PEAK], self.of_others)})

    def largest_peak(self, processes: int) -> float:
        """That a heartbeat told of; signs of more processes are of an earlier start."""
        return max((sign.gpu_peak_gib or 0.0 for sign in read_signs(self.run) if sign.rank < processes), default=0.0)


def gpu_memory() -> dict[str, float]:
    """Of this process's GPU; nobody waits for it."""
    figures = torch.cuda.memory_stats()
    return {
        "gpu_memory_allocated_gib": round(figures.get("allocated_bytes.all.current", 0) / GIB, 3),
        "gpu_memory_reserved_gib": round(figures.get("reserved_bytes.all.current", 0) / GIB, 3),
        PEAK: round(figures.get("allocated_bytes.all.peak", 0) / GIB, 3),
    }
