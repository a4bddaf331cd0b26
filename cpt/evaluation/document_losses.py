"""Loss on each held-out document, so that two models can be compared document by document."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn

from cpt.data.held_out import HeldOutSet
from cpt.data.packing import PackedRows
from cpt.errors import DataError
from cpt.evaluation.kept_losses import DocumentLosses, keep_losses
from cpt.evaluation.perplexity import AfterBatch, ScoredBatch, go_on, scored_batches, sum_over_processes
from cpt.ranks import is_main_process


def document_losses(
    model: nn.Module, held_out: Mapping[str, HeldOutSet], *, batch_size: int, after_batch: AfterBatch = go_on
) -> dict[str, DocumentLosses]:
    """Measure the model on each document of each set, over all processes; every process gets the same losses.

    A document's first token is not predicted; it is the begin token if the tokenizer adds one.

    Args:
        model, batch_size, after_batch: as for `scored_batches`.

    Raises:
        DataError: a set has nothing to predict.
    """
    losses = {name: losses_of_set(model, its, batch_size, after_batch) for name, its in held_out.items()}
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
    """Like `document_losses`. The losses of step 0 and of the last evaluation are kept in the run's folder, for the
    verdict.

    Returns:
        `{name}_loss` (nats per token), `{name}_perplexity`, `{name}_bits_per_byte`, `{name}_accuracy` (share of the
        tokens that were the most likely one) and `{name}_tokens` (predicted ones), by set.
    """
    losses = document_losses(model, held_out, batch_size=batch_size, after_batch=after_batch)
    if losses and is_main_process():
        keep_losses(run_folder, step, losses)
    return {f"{name}_{figure}": value for name, its in losses.items() for figure, value in its.figures().items()}


def losses_of_set(
    model: nn.Module, held_out_set: HeldOutSet, batch_size: int, after_batch: AfterBatch
) -> DocumentLosses:
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
    hashes, num_bytes = rows.documents.hashes[chosen], rows.documents.num_bytes[chosen]
    return DocumentLosses(hashes, num_bytes, nats, num_tokens.astype(np.int64), num_correct.astype(np.int64))


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
