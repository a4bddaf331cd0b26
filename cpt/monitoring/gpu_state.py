"""How hot and how busy the GPU is, and what it draws: asked of NVML where `nvidia-ml-py` is installed."""

import importlib.util
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.monitoring.pace import Pace


class GpuState(TrainerCallback):
    """Adds `gpu_temperature_celsius`, `gpu_power_watts` and `gpu_utilization_percent` of the main process's GPU.

    Where NVML answers once that it cannot tell, as inside of some containers and on parts of a GPU, it is not asked
    again.
    """

    def __init__(self) -> None:
        self.pace = Pace()
        self.answers = importlib.util.find_spec("pynvml") is not None

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add them to logs of the training loss."""
        if self.answers and "loss" in kwargs["logs"] and args.device.type == "cuda" and state.is_world_process_zero:
            kwargs["logs"].update(self.pace.look(self.figures) or {})

    def figures(self) -> dict[str, float]:
        """Of this moment; utilization is the share of the last moments in which a kernel ran."""
        from pynvml import NVMLError

        try:
            return {
                "gpu_temperature_celsius": torch.cuda.temperature(),
                "gpu_power_watts": torch.cuda.power_draw() / 1000,
                "gpu_utilization_percent": torch.cuda.utilization(),
            }
        except (NVMLError, RuntimeError):
            self.answers = False
            return {}
