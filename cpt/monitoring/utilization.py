"""How much of what the GPUs could compute the training computes: model FLOPs utilization."""

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.data.mixture import RowsOfSteps
from cpt.data.prepared import PreparedData
from cpt.hardware import known_gpu
from cpt.models.inventory import build_on_meta, flops_per_token

log = logging.getLogger("cpt")
ROWS_LOOKED_AT = 32
TOKENS_PER_SECOND = "tokens_per_second"


class ModelFlopsUtilization(TrainerCallback):
    """Adds `mfu` to each log of the training loss: tokens a second x operations that training on a token needs / the
    GPUs' peak.

    Only real tokens count, attention only over a token's own document, and nothing that is computed a second time or
    for nobody (arXiv 2204.02311, appendix B). A CPU, and a GPU whose data sheet is not known, have no figure.

    Args:
        rows: which of them a step reads.
        gpu: what the driver calls it; None on a CPU.
        trains_weights: False where gradients only pass through the matrices, as under adapters.
    """

    def __init__(self, data: PreparedData, rows: RowsOfSteps, gpu: str | None, *, trains_weights: bool = True) -> None:
        self.data, self.rows, self.gpu, self.trains_weights = data, rows, gpu, trains_weights
        self.peak: float | None = None
        self.since = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count once what a token needs."""
        model: nn.Module = kwargs["model"]
        self.since = state.global_step
        of_one = peak_flops(self.gpu, precision_of(args, model)) if state.is_world_process_zero else None
        if of_one is None:
            return
        try:
            self.flops = self.count(model, self.rows.first(state.global_step))
        except Exception as problem:  # of a model's own code, which an estimate must not stop
            log.info(
                f"mfu is left out: the operations of this model cannot be counted ({type(problem).__name__}:"
                f" {problem})."
            )
            return
        self.peak = of_one * max(1, args.world_size * args.n_gpu)

    def count(self, model: nn.Module, first: int) -> float:
        """Operations that training on one token needs, in documents as long as those from row `first` on."""
        config: Any = next(part for part in model.modules() if isinstance(part, PreTrainedModel)).config
        attended = attended_length(self.data.rows.documents_in(row) for row in range(first, first + ROWS_LOOKED_AT))
        return flops_per_token(build_on_meta(config), attended, trains_weights=self.trains_weights)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The run may have gone back."""
        self.since = state.global_step

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Of the time since the last log, as `tokens_per_second` is."""
        logs = kwargs["logs"]
        if self.peak is None or TOKENS_PER_SECOND not in logs:
            return
        filled = self.data.filled(self.rows.first(state.global_step), first=self.rows.first(self.since))
        logs["mfu"] = round(logs[TOKENS_PER_SECOND] * filled * self.flops / self.peak, 4)
        self.since = state.global_step


def peak_flops(gpu: str | None, precision: str) -> float | None:
    """Operations a second that the data sheet names for products of dense matrices; None where it is not known."""
    kind = known_gpu(gpu) if gpu is not None else None
    tflops = kind.tflops(precision) if kind is not None else None
    return None if tflops is None else 1e12 * tflops


def precision_of(args: TrainingArguments, model: nn.Module) -> str:
    """In which the matrices are multiplied: `half`, `tf32` or `fp32`."""
    kept = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    if args.bf16 or args.fp16 or kept in (torch.bfloat16, torch.float16):
        return "half"
    return "tf32" if args.tf32 else "fp32"


def attended_length(rows: Iterable[NDArray[np.int64]]) -> float:
    """How long documents are, seen from a mean token: it attends to half of its own.

    Args:
        rows: tokens of each document in them.
    """
    lengths = np.concatenate(list(rows)).astype(np.float64)
    return float((lengths**2).sum() / lengths.sum())
