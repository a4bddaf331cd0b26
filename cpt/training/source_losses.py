"""Log the training loss of each source, from the micro-batches of the training."""

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from cpt.data.rows.build import PreparedData
from cpt.data.rows.mixture import RowsOfSteps
from cpt.hf_internals import IGNORED
from cpt.models.fused_loss import FusedLoss, OwnLoss, without_adapter

BYTES_AT_ONCE = 2**27  # of logits in fp32 and of their gradients


class SourceLosses(TrainerCallback):
    """Adds `loss_<source>` to logs of the training loss: the mean over a source's tokens in one step since the last
    log, of all processes.

    Step and micro-batch are random: with a fixed position, interleaved sources could always show the same source. A
    micro-batch with one source uses its loss. With several, losses per row are recomputed from the logits without
    gradients: about a twentieth of the micro-batch's time, once per log. Without logits (Liger's loss), mixed
    micro-batches are skipped.
    """

    def __init__(self, data: PreparedData, rows: RowsOfSteps, *, sharing_rows: int = 1) -> None:
        self.data = data
        self.rows = rows
        self.sharing_rows = sharing_rows
        self.micro_batch = self.measured = 0
        self.is_measuring = self.is_off = False
        self.totals = torch.zeros(2, len(data.sources))  # summed losses, tokens
        self.hook: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hook into the model. It is off under DataParallel, which splits batches over GPUs."""
        self.totals = torch.zeros(2, len(self.data.sources), device=args.device)
        self.is_off = args.n_gpu > 1 or args.logging_strategy != IntervalStrategy.STEPS
        if not self.is_off and self.hook is None:
            self.args = args
            self.state = state
            self.hook = kwargs["model"].register_forward_hook(self.look, with_kwargs=True)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        step = state.global_step + 1
        every = int(state.logging_steps)
        self.state = state
        self.micro_batch = 0
        log = (step - 1) // every
        # equal in every process and after a resume
        drawn = Random(log).randrange(every)
        self.measured = Random(step).randrange(args.gradient_accumulation_steps)
        self.is_measuring = step == log * every + 1 + drawn or (
            args.logging_first_step and step == 1
        )

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the means over all processes; these log at the same steps."""
        if "loss" not in kwargs["logs"] or self.is_off:
            return
        if args.world_size > 1:
            dist.all_reduce(self.totals)
        sums, tokens = self.totals.tolist()
        self.totals.zero_()
        for source, loss, count in zip(self.data.sources, sums, tokens, strict=True):
            if count and abs(loss) < float("inf"):  # also false for NaN
                kwargs["logs"][f"loss_{source.name}"] = loss / count

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = None

    def look(self, model: nn.Module, _: Any, inputs: dict[str, Any], output: Any) -> None:
        """The forward hook; it does not change the output."""
        if not (model.training and torch.is_grad_enabled()):
            return
        if self.is_measuring and isinstance(output, dict):
            targets = inputs.get("shift_labels")
            labels = inputs.get("labels")
            if targets is None and isinstance(labels, torch.Tensor):
                targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
            if targets is not None:
                with torch.no_grad():
                    self.add(model, targets, inputs.get("num_items_in_batch"), output)
        self.micro_batch += 1

    def add(
        self,
        model: nn.Module,
        targets: torch.Tensor,
        num_items: torch.Tensor | int | None,
        output: dict[str, Any],
    ) -> None:
        """Add a micro-batch's losses; `targets` are the next tokens, [rows, tokens]."""
        sources = [self.data.rows.turn(row)[0] for row in self.rows_under_way()]
        mean = mean_cross_entropy(model, output)
        if len(set(sources)) == 1 and mean is not None:
            tokens = (targets != IGNORED).sum()
            loss = mean.detach().float() * (tokens if num_items is None else num_items)
            self.take(sources[0], loss, tokens)
            return
        row_loss = loss_of_rows(model, output.get("logits"), targets)
        if (
            row_loss is not None
            and len(targets) == len(sources)
            and self.micro_batch == self.measured
        ):
            for row, source in enumerate(sources):
                self.take(source, row_loss(row), (targets[row] != IGNORED).sum())

    def take(self, source: int, loss: torch.Tensor, tokens: torch.Tensor) -> None:
        self.totals[0, source] += loss
        self.totals[1, source] += tokens

    def rows_under_way(self) -> range:
        """Global indices of the rows in the current micro-batch, see `CPTDataLoader`."""
        args = self.args
        size = self.args.per_device_train_batch_size
        groups = args.world_size // self.sharing_rows
        group = args.process_index // self.sharing_rows
        first = self.rows.first(self.state.global_step) + (self.micro_batch * groups + group) * size
        return range(first, first + size)


def mean_cross_entropy(model: nn.Module, output: dict[str, Any]) -> torch.Tensor | None:
    """Return the micro-batch's loss without penalties; None if it contains smoothed labels or a penalty."""
    loss_function = getattr(without_adapter(model), "loss_function", None)
    if isinstance(loss_function, OwnLoss) and loss_function.smoothing:
        return None
    if isinstance(loss_function, OwnLoss | FusedLoss) and loss_function.memory.last is not None:
        return loss_function.memory.last
    if output.get("aux_loss") is None:
        return output.get("loss")
    return None


def loss_of_rows(
    model: nn.Module, logits: torch.Tensor | None, targets: torch.Tensor
) -> Callable[[int], torch.Tensor] | None:
    """Return a function: row -> its summed loss; None without logits [rows, tokens, vocabulary]."""
    if logits is None or logits.shape[:2] != targets.shape:
        return None
    fused = without_adapter(model).loss_function
    if isinstance(fused, FusedLoss):
        losses = fused.token_losses
        if losses is None:
            return None
        return lambda row: losses[row].sum()

    def summed(row: int) -> torch.Tensor:
        """Cross entropy in fp32, in chunks of tokens."""
        tokens = max(1, BYTES_AT_ONCE // (12 * logits.shape[-1]))
        chunks = zip(logits[row].split(tokens), targets[row].split(tokens), strict=True)
        parts = []
        for hidden_chunk, target_chunk in chunks:
            part = F.cross_entropy(
                hidden_chunk.float(),
                target_chunk.to(hidden_chunk.device),
                ignore_index=IGNORED,
                reduction="sum",
            )
            parts.append(part)
        return torch.stack(parts).sum()

    return summed
