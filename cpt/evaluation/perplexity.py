"""Score held-out rows: the negative log-likelihood of each token, and whether it was the most likely one."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cpt.data.held_out import HeldOutSet
from cpt.data.packing import stack_rows
from cpt.models.fused_loss import FusedLoss, fused_scores

POSITIONS_AT_ONCE = 1024  # of logits in fp32: 1 GiB for a vocabulary of 256k; a row of 8,192 would need 8 GiB


@dataclass(frozen=True)
class ScoredBatch:
    """Scores of some rows: B sequences of T tokens, of which T - 1 can be predicted."""

    rows: Sequence[int]
    """Their numbers."""
    position_ids: torch.Tensor
    """[B, T], beginning anew with each piece of a document."""
    nats: torch.Tensor
    """[B, T - 1] float64, of the token one to the right; 0 where nothing is predicted."""
    is_predicted: torch.Tensor
    """[B, T - 1]"""
    is_correct: torch.Tensor
    """[B, T - 1]: the token was the most likely one."""


AfterBatch = Callable[[], None]


def go_on() -> None:
    """The default of `after_batch`."""


def sum_over_processes(sums: torch.Tensor) -> None:
    """In place, if there are several processes."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(sums)


def scored_batches(
    model: nn.Module, held_out_set: HeldOutSet, batch_size: int, after_batch: AfterBatch = go_on
) -> Iterator[ScoredBatch]:
    """Scores of this process's rows, batch by batch; every process gets the same number of batches.

    Args:
        model: plain, a PeftModel, or wrapped by DDP or DeepSpeed. Its mode and the random state do not change.
        batch_size: rows in one forward pass; the scores do not depend on it.
        after_batch: called after each batch; an exception that it raises ends the evaluation.
    """
    # DDP's own forward would synchronise buffers; DeepSpeed's gathers the parameters and must stay.
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    device = next(model.parameters()).device
    is_batch = held_out_set.rows[0]["input_ids"].dim() == 2  # a row of a token budget
    with evaluation_mode(model), fused_scores(model) as fused:
        for numbers, counts in batches(len(held_out_set.rows), 1 if is_batch else batch_size):
            rows = [held_out_set.rows[number] for number in numbers]
            batch = {key: values.to(device) for key, values in stack_rows(rows).items()}
            labels = batch.pop("labels")
            # A cache would make transformers ignore where documents begin. So would a mask, which packed rows do not
            # have.
            scores = score(inner, fused, batch, labels)
            if counts:
                yield ScoredBatch(numbers, batch["position_ids"], *scores)
            after_batch()


def batches(num_items: int, batch_size: int) -> Iterator[tuple[Sequence[int], bool]]:
    """Numbers of this process's items in batches, each with whether it counts.

    Every process gets the same number of batches, as ZeRO-3's gathering of parameters needs: a process without items
    left repeats the first.
    """
    parallel = dist.is_available() and dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if parallel else (0, 1)
    mine = range(rank, num_items, world_size)
    for number in range(math.ceil(math.ceil(num_items / world_size) / batch_size)):
        indexes = mine[number * batch_size : (number + 1) * batch_size]
        yield indexes or (0,), bool(indexes)


def score(
    model: nn.Module, fused: FusedLoss | None, batch: Mapping[str, torch.Tensor], labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Like `score_tokens`, by chunks of the head if the model allows it (`fused_scores`)."""
    scored = None if fused is None else fused.score(model, batch, labels)
    if scored is None:
        return score_tokens(model(**batch, use_cache=False).logits, labels)
    nats, is_correct = (values[:, :-1] for values in scored)
    return nats.double(), labels[:, 1:] != -100, is_correct


def score_tokens(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The negative log-likelihood of each token but the first, whether it is predicted, and whether it was the most
    likely.

    Args:
        logits: [B, T, V]; they predict the label one to the right.
        labels: [B, T]; -100 is not predicted.
    """
    targets = labels[:, 1:]
    nats = torch.zeros(targets.shape, dtype=torch.float64, device=logits.device)
    is_correct = torch.zeros(targets.shape, dtype=torch.bool, device=logits.device)
    for row, row_logits in enumerate(logits):
        for start in range(0, targets.shape[1], POSITIONS_AT_ONCE):
            place = slice(start, start + POSITIONS_AT_ONCE)
            chunk, wanted = row_logits[:-1][place].float(), targets[row, place]
            nats[row, place] = F.cross_entropy(chunk, wanted, ignore_index=-100, reduction="none").double()
            is_correct[row, place] = chunk.argmax(-1) == wanted
    return nats, targets != -100, is_correct


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout and no gradients inside; afterwards each module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
