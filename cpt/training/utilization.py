"""Log model FLOPs utilization: the share of the GPUs' peak that the training uses."""

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.data.build import PreparedData
from cpt.data.mixture import RowsOfSteps
from cpt.hardware import known_gpu
from cpt.models.inventory import build_on_meta, flops_per_token

log = logging.getLogger("cpt")
ROWS_MEASURED = 32
TOKENS_PER_SECOND = "tokens_per_second"


class ModelFlopsUtilization(TrainerCallback):
    """Adds `mfu`: tokens per second x operations that training on a token needs / peak of all GPUs.

    Padding, attention to other documents and recomputation do not count (arXiv 2204.02311, appendix B). There is no
    figure on CPUs and on GPUs without a known data sheet.

    Args:
        rows: which of them a step reads.
        gpu: the driver's name for it; None on a CPU.
        trains_weights: False if gradients only pass through the matrices, as with adapters.
    """

    def __init__(self, data: PreparedData, rows: RowsOfSteps, gpu: str | None, *, trains_weights: bool = True) -> None:
        self.data, self.rows, self.gpu, self.trains_weights = data, rows, gpu, trains_weights
        self.peak: float | None = None
        self.since = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: nn.Module = kwargs["model"]
        self.since = state.global_step
        of_one = peak_flops(self.gpu, precision_of(args, model)) if state.is_world_process_zero else None
        if of_one is None:
            return
        try:
            self.flops = self.count(model, self.rows.first(state.global_step))
        except Exception as problem:  # of a model's own code, which an estimate must not stop
            log.info(f"mfu is not logged: cannot count the operations of this model: {problem!r}.")
            return
        self.peak = of_one * max(1, args.world_size * args.n_gpu)

    def count(self, model: nn.Module, first: int) -> float:
        """Operations per token, for documents as long as those from row `first` on."""
        config: Any = next(part for part in model.modules() if isinstance(part, PreTrainedModel)).config
        attended = attended_length(self.data.rows.documents_in(row) for row in range(first, first + ROWS_MEASURED))
        return flops_per_token(build_on_meta(config), attended, trains_weights=self.trains_weights)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Over the time since the last log, like `tokens_per_second`."""
        logs = kwargs["logs"]
        if self.peak is None or TOKENS_PER_SECOND not in logs:
            return
        filled = self.data.filled(self.rows.first(state.global_step), first=self.rows.first(self.since))
        logs["mfu"] = round(logs[TOKENS_PER_SECOND] * filled * self.flops / self.peak, 4)
        self.since = state.global_step


def peak_flops(gpu: str | None, precision: str) -> float | None:
    """Operations per second on dense matrices, from the data sheet; None if unknown."""
    kind = known_gpu(gpu) if gpu is not None else None
    tflops = kind.tflops(precision) if kind is not None else None
    return None if tflops is None else 1e12 * tflops


def precision_of(args: TrainingArguments, model: nn.Module) -> str:
    """Precision of matrix products: `half`, `tf32` or `fp32`."""
    kept = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    if args.bf16 or args.fp16 or kept in (torch.bfloat16, torch.float16):
        return "half"
    return "tf32" if args.tf32 else "fp32"


def attended_length(rows: Iterable[NDArray[np.int64]]) -> float:
    """Mean length of a token's own document, of which it attends to half.

    Args:
        rows: tokens of each document in them.
    """
    lengths = np.concatenate(list(rows)).astype(np.float64)
    return float((lengths**2).sum() / lengths.sum())
