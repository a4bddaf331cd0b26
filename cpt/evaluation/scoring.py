"""Measure the losses of held-out texts, by document."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cpt.data.rows.held_out import HeldOutSet
from cpt.data.rows.packing import PackedRows, stack_rows
from cpt.distributed import has_process_group, is_main_process
from cpt.errors import DataError
from cpt.evaluation.paired import DocumentLosses, save_losses, saved_losses
from cpt.models.fused_loss import fused_scores
from cpt.runs.events import record_event
from cpt.runs.folder import HELD_OUT

POSITIONS_AT_ONCE = 1024  # of logits in fp32: 1 GiB for a vocabulary of 256k; a row of 8,192 would need 8 GiB
AfterBatch = Callable[[], None]


@dataclass(frozen=True)
class ScoredBatch:
    """Scores of some rows: B sequences of T tokens, of which T - 1 can be predicted."""

    rows: Sequence[int]  # their numbers
    position_ids: torch.Tensor  # [B, T], beginning anew with each piece of a document
    nats: torch.Tensor  # [B, T - 1] float64, of the token one to the right; 0 where nothing is predicted
    is_predicted: torch.Tensor  # [B, T - 1]
    is_correct: torch.Tensor  # [B, T - 1]: the token was the most likely one


def sum_over_processes(sums: torch.Tensor) -> None:
    """In place, if there are several processes."""
    if has_process_group():
        dist.all_reduce(sums)


def scored_batches(
    model: nn.Module, held_out_set: HeldOutSet, batch_size: int, after_batch: AfterBatch | None = None
) -> Iterator[ScoredBatch]:
    """Scores of this process's rows. The model may be wrapped by DDP or DeepSpeed; its mode and the random state do
    not change. The scores do not depend on the batch size."""
    # DDP's own forward would synchronise buffers; DeepSpeed's gathers the parameters and must stay.
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    device = next(model.parameters()).device
    is_batch = held_out_set.rows[0]["input_ids"].dim() == 2  # a row of a token budget
    with evaluation_mode(model), fused_scores(model) as fused:
        for numbers, counts in batches(len(held_out_set.rows), 1 if is_batch else batch_size):
            rows = [held_out_set.rows[number] for number in numbers]
            batch = {key: values.to(device) for key, values in stack_rows(rows).items()}
            labels = batch.pop("labels")
            if fused is not None and (scored := fused.score(inner, batch, labels)) is not None:
                nats, is_correct = (values[:, :-1] for values in scored)
                scores = nats.double(), labels[:, 1:] != -100, is_correct
            else:
                # A cache would make transformers ignore where documents begin. So would a mask, which packed rows do
                # not have.
                scores = score_tokens(inner(**batch, use_cache=False).logits, labels)
            if counts:
                yield ScoredBatch(numbers, batch["position_ids"], *scores)
            if after_batch is not None:
                after_batch()


def batches(num_items: int, batch_size: int) -> Iterator[tuple[Sequence[int], bool]]:
    """Numbers of this process's items in batches, each with whether it counts. Every process gets as many batches, as
    ZeRO-3's gathering of parameters needs: a process without items left repeats the first."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if has_process_group() else (0, 1)
    mine = range(rank, num_items, world_size)
    for number in range(math.ceil(math.ceil(num_items / world_size) / batch_size)):
        indexes = mine[number * batch_size : (number + 1) * batch_size]
        yield indexes or (0,), bool(indexes)


def score_tokens(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The negative log-likelihood of each token but the first, whether it is predicted (its label is not -100), and
    whether it was the most likely. The logits [B, T, V] predict the label [B, T] one to the right."""
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


def document_losses(
    model: nn.Module, held_out: Mapping[str, HeldOutSet], *, batch_size: int, after_batch: AfterBatch | None = None
) -> dict[str, DocumentLosses]:
    """Measure the model on each document of each set, over all processes; every process gets the same losses. A
    document's first token is not predicted; it is the begin token if the tokenizer adds one. DataError if a set has
    nothing to predict."""
    losses, device = {}, next(model.parameters()).device
    for name, held_out_set in held_out.items():
        rows, chosen = cast(PackedRows, held_out_set.rows), held_out_set.chosen
        assert chosen is not None, "the set comes from `build_data`"
        sums = torch.zeros(3, len(chosen), dtype=torch.float64, device=device)  # nats, tokens, correct ones
        # Of two documents that begin at one place the first would be empty, and none is.
        begins = torch.from_numpy(rows.documents.offsets[chosen])
        for batch in scored_batches(model, held_out_set, batch_size, after_batch):
            document = document_of_tokens(batch, rows, begins).to(device)
            for values, line in zip((batch.nats, batch.is_predicted, batch.is_correct), sums, strict=True):
                line.index_add_(0, document.flatten(), (values * batch.is_predicted).flatten().double())
        sum_over_processes(sums)
        nats, num_tokens, num_correct = sums.cpu().numpy()
        counts = (num_tokens.astype(np.int64), num_correct.astype(np.int64))
        hashes, num_bytes = rows.documents.hashes[chosen], rows.documents.num_bytes[chosen]
        losses[name] = DocumentLosses(hashes, num_bytes, nats, *counts)
    for name, found in losses.items():
        if not found.num_tokens.any():
            raise DataError(
                f"the held-out set `{name}` has no document of two tokens or more, so there is nothing to predict."
                " Give it text."
            )
    return losses


def measure_and_keep(
    model: nn.Module,
    held_out: Mapping[str, HeldOutSet],
    *,
    batch_size: int,
    run_folder: Path,
    step: int,
    after_batch: AfterBatch | None = None,
) -> dict[str, float]:
    """Keep the losses of step 0 and of the last evaluation in the run's folder, for the verdict; return `{name}_loss`
    and the other figures of `DocumentLosses` of each set."""
    losses = document_losses(model, held_out, batch_size=batch_size, after_batch=after_batch)
    if losses and is_main_process():
        try:
            save_losses(run_folder / HELD_OUT / f"step-{step}.npz", losses)
        except OSError as problem:  # a full disk costs the intervals, not the run
            why = f"The losses of each document at step {step} are not kept: {problem.strerror}."
            record_event(run_folder, "not_written", f"{why} The evaluation's figures are logged.", step=step)
        with suppress(OSError):  # of a read-only disk; earlier losses go even if nothing took their place
            for other, path in saved_losses(run_folder).items():
                if other not in (0, step):
                    path.unlink()
    return {f"{name}_{figure}": value for name, its in losses.items() for figure, value in its.figures().items()}


def document_of_tokens(batch: ScoredBatch, rows: PackedRows, begins: torch.Tensor) -> torch.Tensor:
    """[B, T - 1]: the document of each predicted token, by its number in the set; undefined for padding."""
    documents = []
    is_first = (batch.position_ids == 0).cpu()
    for row in batch.rows:
        starts, _ = rows.packing.pieces(row, 0)
        documents.append(torch.searchsorted(begins, torch.from_numpy(np.array(starts)), right=True) - 1)
    if len(is_first) != len(batch.rows):  # a row of a token budget: each line of it is a piece
        return documents[0][:, None].expand(-1, is_first.shape[1] - 1)
    piece = is_first.cumsum(1) - 1
    return torch.stack([of_row[piece[i].clamp(max=len(of_row) - 1)] for i, of_row in enumerate(documents)])[:, 1:]
