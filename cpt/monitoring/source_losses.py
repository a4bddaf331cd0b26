"""Which source the model finds hard: the loss of each source's rows, from micro-batches that are trained on anyway."""

import logging
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import nn
from torch.nn import functional as F
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from cpt.data.mixture import RowsOfSteps
from cpt.data.prepared import PreparedData
from cpt.data.rows.rows import IGNORED
from cpt.models.fused_loss import FusedLoss

log = logging.getLogger("cpt")
MICRO_BATCHES_FOR_ONE = 20
"""So many are trained on for each that is looked at again: that takes about a twentieth of its training."""
BYTES_AT_ONCE = 2**27  # of logits in fp32, and of what the loss makes of them
Totals = torch.Tensor  # [2, sources]: summed losses, tokens


class SourceLosses(TrainerCallback):
    """Adds `loss_<source>` to logs of the training loss: the mean over a source's tokens in one step since the last
    log, of all processes.

    Which step that is, and where in it the looking begins, is drawn by their numbers: sources take turns, and the same
    place in each stretch could show the same source again and again. A micro-batch of a single source brings its loss
    along. Of one with several, the losses of its rows are computed again from the logits that are there, without
    gradients; one in 20 micro-batches at most, so that runs that log each step have the figures now and then. The
    fused loss has the loss of each token anyway. Without logits and without it (a loss of Liger's), mixed
    micro-batches are left out.

    Args:
        rows: which of them a step reads.
        sharing_rows: processes that train on parts of the same rows.
    """

    def __init__(
        self,
        data: PreparedData,
        rows: RowsOfSteps,
        *,
        sharing_rows: int = 1,
    ) -> None:
        self.data, self.rows, self.sharing_rows = data, rows, sharing_rows
        self.micro_batch, self.left, self.first_looked_at = 0, 0, 0
        self.is_looking, self.is_off, self.has_told, self.has_no_memory = False, False, False, False
        self.totals: Totals = torch.zeros(2, len(data.sources))
        self.hook: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at what the model gives. Where torch itself divides batches over GPUs, nobody knows whose rows it
        sees."""
        self.totals = torch.zeros(2, len(self.data.sources), device=args.device)
        self.is_off = args.n_gpu > 1 or args.logging_strategy != IntervalStrategy.STEPS
        if not self.is_off and self.hook is None:
            self.args, self.state = args, state
            self.hook = kwargs["model"].register_forward_hook(self.look, with_kwargs=True)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Whether the step that begins is the one of its log."""
        step, every, micro_batches = state.global_step + 1, int(state.logging_steps), args.gradient_accumulation_steps
        self.state, self.micro_batch = state, 0
        log = (step - 1) // every
        self.is_looking = step == log * every + 1 + drawn(log, every) or (args.logging_first_step and step == 1)
        if self.is_looking:
            self.left = looks_at((log + 1) * every, every, micro_batches) if not self.has_no_memory else 0
            self.first_looked_at = drawn(step, micro_batches - self.left + 1)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the means; all processes log at the same steps, so they can add up what they saw."""
        if "loss" not in kwargs["logs"] or self.is_off:
            return
        if args.world_size > 1:
            dist.all_reduce(self.totals)
        sums, tokens = self.totals.tolist()
        self.totals.zero_()
        for source, loss, count in zip(self.data.sources, sums, tokens, strict=True):
            if count and abs(loss) < float("inf"):  # also where it is not a number
                kwargs["logs"][f"loss_{source.name}"] = loss / count

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Nothing stays behind in the model."""
        if self.hook is not None:
            self.hook.remove()
            self.hook = None

    # --- a forward pass ----------------------------------------------------------------------------------------------

    def look(self, model: nn.Module, _: Any, inputs: dict[str, Any], output: Any) -> None:
        """A hook of the model's forward pass, which changes nothing of what it gives."""
        if not (model.training and torch.is_grad_enabled()):
            return
        if self.is_looking and isinstance(output, dict):
            with torch.no_grad():
                self.look_at(model, inputs, output)
        self.micro_batch += 1

    def look_at(self, model: nn.Module, inputs: dict[str, Any], output: dict[str, Any]) -> None:
        """Add what a micro-batch tells; memory that ends here ends no step."""
        targets = targets_of(inputs)
        if targets is None:
            return
        try:
            self.add(model, targets, inputs.get("num_items_in_batch"), output)
        except torch.OutOfMemoryError:
            self.has_no_memory, self.left = True, 0
            log.warning(
                "loss_<source> is left out from here on: memory ended where the losses of single rows were computed."
            )

    def add(
        self, model: nn.Module, targets: torch.Tensor, num_items: torch.Tensor | int | None, output: dict[str, Any]
    ) -> None:
        """Add what a micro-batch tells.

        Args:
            targets: [rows, tokens], those of the next tokens.
        """
        sources = [self.data.rows.turns.turn(row)[0] for row in self.rows_under_way()]
        if len(set(sources)) == 1 and output.get("aux_loss") is None and output.get("loss") is not None:
            tokens = (targets != IGNORED).sum()
            self.take(
                sources[0], output["loss"].detach().float() * (tokens if num_items is None else num_items), tokens
            )
            return
        row_loss = loss_of_rows(model, output.get("logits"), targets)
        if row_loss is None or len(targets) != len(sources):
            self.tell_left_out()
        elif self.left and self.micro_batch >= self.first_looked_at:
            self.left -= 1
            for source, row in zip(sources, range(len(targets)), strict=True):
                self.take(source, row_loss(row), (targets[row] != IGNORED).sum())

    def take(self, source: int, loss: torch.Tensor, tokens: torch.Tensor) -> None:
        """A summed loss, and of how many tokens."""
        self.totals[0, source] += loss
        self.totals[1, source] += tokens

    def rows_under_way(self) -> range:
        """Global numbers of the rows in the micro-batch that is on its way through the model, see `CPTDataLoader`."""
        args, size = self.args, self.args.per_device_train_batch_size
        groups, group = args.world_size // self.sharing_rows, args.process_index // self.sharing_rows
        first = self.rows.first(self.state.global_step) + (self.micro_batch * groups + group) * size
        return range(first, first + size)

    def tell_left_out(self) -> None:
        """Say once what is missing, and why."""
        if not self.has_told:
            self.has_told = True
            log.info(
                "loss_<source> leaves out micro-batches with rows of several sources: this model gives no logits while"
                " it trains (`training.use_liger_kernel`). With `training.per_device_train_batch_size: 1` there is"
                " none of those."
            )


def drawn(number: int, below: int) -> int:
    """A number from 0 on, the same for the same step in every process and after a resume."""
    return Random(number).randrange(below)


def looks_at(step: int, every: int, micro_batches: int) -> int:
    """How many mixed micro-batches may be looked at for a log: a function of its step, so a run that goes on looks at
    the same.

    Args:
        step: that is logged.
        every: how many steps lie between two logs.
        micro_batches: of a step.
    """
    upto, before = (math.ceil(made * micro_batches / MICRO_BATCHES_FOR_ONE) for made in (step, max(0, step - every)))
    return min(upto - before, micro_batches)


def targets_of(inputs: dict[str, Any]) -> torch.Tensor | None:
    """What each position is to predict; None where the model is given no labels, and the loss is made elsewhere."""
    shifted, labels = inputs.get("shift_labels"), inputs.get("labels")
    if shifted is not None:
        return torch.as_tensor(shifted)
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:] if isinstance(labels, torch.Tensor) else None


def loss_of_rows(
    model: nn.Module, logits: torch.Tensor | None, targets: torch.Tensor
) -> Callable[[int], torch.Tensor] | None:
    """What gives the summed loss of a row by its number; None where the model returns no logits.

    Args:
        logits: [rows, tokens, vocabulary]; unused where the fused loss has the loss of each token.
    """
    if logits is None or logits.shape[:2] != targets.shape:
        return None
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    fused = whole.loss_function
    if isinstance(fused, FusedLoss):
        losses = fused.token_losses
        return None if losses is None else lambda row: losses[row].sum()
    return lambda row: summed_loss(logits[row], targets[row])


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of a row, summed in fp32, some tokens at a time.

    Args:
        logits: [tokens, vocabulary].
    """
    tokens = max(1, BYTES_AT_ONCE // (12 * logits.shape[-1]))
    parts: Sequence[torch.Tensor] = [
        F.cross_entropy(some.float(), wanted.to(some.device), ignore_index=IGNORED, reduction="sum")
        for some, wanted in zip(logits.split(tokens), targets.split(tokens), strict=True)
    ]
    return torch.stack(list(parts)).sum()
