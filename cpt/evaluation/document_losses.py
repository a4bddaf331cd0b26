"""What a model loses on each held-out document by itself, so that two models can be compared document by document."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn

from cpt.data.held_out import HeldOutSet
from cpt.data.rows.rows import PackedRows
from cpt.errors import DataError
from cpt.evaluation.kept_losses import DocumentLosses, keep_losses
from cpt.evaluation.perplexity import (
    AfterBatch,
    ScoredBatch,
    evaluate_held_out,
    go_on,
    scored_batches,
    sum_over_processes,
)
from cpt.ranks import is_main_process


def document_losses(
    model: nn.Module, held_out: Mapping[str, HeldOutSet], *, batch_size: int, after_batch: AfterBatch = go_on
) -> dict[str, DocumentLosses]:
    """Measure the model on each document of each set, over all processes; every one gets the same figures.

    Args:
        model: as `evaluate_held_out` takes it.
        held_out: of `build_data`.
        after_batch: as `evaluate_held_out` takes it.

    Raises:
        DataError: a set has nothing to predict.
    """
    losses = {
        name: losses_of_set(model, held_out_set, batch_size, after_batch) for name, held_out_set in held_out.items()
    }
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
    after_batch: AfterBatch = go_on,
) -> dict[str, float]:
    """What `evaluate_held_out` gives; each document's losses stay in the run's folder, so that its verdict has
    intervals.

    Kept are those of before the first step and those of now. Sets made by hand have no documents to be told apart.

    Raises:
        DataError: a set has nothing to predict.
    """
    by_hand = {name: of_set for name, of_set in held_out.items() if of_set.chosen is None}
    told_apart = {name: of_set for name, of_set in held_out.items() if name not in by_hand}
    losses = document_losses(model, told_apart, batch_size=batch_size, after_batch=after_batch)
    figures = evaluate_held_out(model, by_hand, batch_size=batch_size, after_batch=after_batch)
    if losses and is_main_process():
        keep_losses(run_folder, step, losses)
    return {
        f"{name}_{figure}": value for name, of_set in losses.items() for figure, value in of_set.figures().items()
    } | figures


def losses_of_set(
    model: nn.Module, held_out_set: HeldOutSet, batch_size: int, after_batch: AfterBatch
) -> DocumentLosses:
    """Of one set."""
    rows, chosen = cast(PackedRows, held_out_set.rows), held_out_set.chosen
    assert chosen is not None, "the set comes from `build_data`"
    device = next(model.parameters()).device
    sums = torch.zeros(3, len(chosen), dtype=torch.float64, device=device)  # nats, tokens, correct ones
    # Of two documents that begin at one place the first would be empty, and none is.
    begins = torch.from_numpy(rows.documents.offsets[chosen])
    for batch in scored_batches(model, held_out_set, batch_size, after_batch):
        document = document_of_tokens(batch, rows, begins).to(device)
        for values, line in zip((batch.nats, batch.is_predicted, batch.is_correct), sums, strict=True):
            line.index_add_(0, document.flatten(), (values * batch.is_predicted).flatten().double())
    sum_over_processes(sums)
    nats, num_tokens, num_correct = sums.cpu().numpy()
    documents = rows.documents
    return DocumentLosses(
        documents.hashes[chosen],
        documents.num_bytes[chosen],
        nats,
        num_tokens.astype(np.int64),
        num_correct.astype(np.int64),
    )


def document_of_tokens(batch: ScoredBatch, rows: PackedRows, begins: torch.Tensor) -> torch.Tensor:
    """[B, T - 1]: the number in the set of the document that each predicted token belongs to; of padding, any."""
    documents = []
    is_first = (batch.position_ids == 0).cpu()
    for row in batch.rows:
        starts, _ = rows.packing.pieces(row, 0)
        documents.append(torch.searchsorted(begins, torch.from_numpy(np.array(starts)), right=True) - 1)
    if len(is_first) != len(batch.rows):  # a row of a token budget: each line of it is a piece
        return documents[0][:, None].expand(-1, is_first.shape[1] - 1)
    piece = is_first.cumsum(1) - 1
    return torch.stack([of_row[piece[i].clamp(max=len(of_row) - 1)] for i, of_row in enumerate(documents)])[:, 1:]
