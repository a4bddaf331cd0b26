"""What a model loses on each held-out document by itself, so that two models can be compared document by document."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import cast
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cpt.data.held_out import HeldOutSet
from cpt.data.rows import PackedRows
from cpt.errors import CheckpointError, DataError
from cpt.evaluation.perplexity import (
    AfterBatch,
    ScoredBatch,
    evaluate_held_out,
    go_on,
    perplexity_of,
    scored_batches,
    sum_over_processes,
)
from cpt.ranks import is_main_process
from cpt.runs.events import record_event

FOLDER = "held_out"  # of a run's folder


@dataclass(frozen=True)
class DocumentLosses:
    """Of one model on one set; the arrays have an item for each document, in the set's order."""

    hashes: NDArray[np.uint64]
    """xxh3-64 of the text: which document it is, whatever tokenizer read it."""
    num_bytes: NDArray[np.int64]
    """UTF-8 bytes of the text."""
    nats: NDArray[np.float64]
    """Negative log-likelihood of the document."""
    num_tokens: NDArray[np.int64]
    """Predicted ones."""
    num_correct: NDArray[np.int64]
    """Those that were the most likely."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return float(self.nats.sum() / self.num_tokens.sum())

    @property
    def perplexity(self) -> float:
        """Per token."""
        return perplexity_of(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits that the model needs for the documents, over their bytes."""
        return float(self.nats.sum() / math.log(2) / self.num_bytes.sum())

    @property
    def accuracy(self) -> float:
        """Share of the tokens that were the most likely one."""
        return float(self.num_correct.sum() / self.num_tokens.sum())

    def figures(self) -> dict[str, float]:
        """As `evaluate_held_out` names them."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "accuracy": self.accuracy,
            "tokens": int(self.num_tokens.sum()),
        }


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
    losses = {name: losses_of_set(model, held_out_set, batch_size, after_batch) for name, held_out_set in held_out.items()}
    for name, found in losses.items():
        if not found.num_tokens.any():
            raise DataError(
                f"the held-out set `{name}` has no document of two tokens or more, so there is nothing to predict. Give it text."
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
    """What `evaluate_held_out` gives; each document's losses stay in the run's folder, so that its verdict has intervals.

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
    return {f"{name}_{figure}": value for name, of_set in losses.items() for figure, value in of_set.figures().items()} | figures


def keep_losses(run_folder: Path, step: int, losses: Mapping[str, DocumentLosses]) -> None:
    """Keep those of this step, and of those before only the first; a disk that takes no more costs the intervals, not the run."""
    try:
        save_losses(run_folder / FOLDER / f"step-{step}.npz", losses)
    except OSError as problem:
        text = f"The losses of each document at step {step} are not kept: {problem.strerror}. The evaluation's figures are logged."
        record_event(run_folder, "not_written", text, step=step)
    with suppress(OSError):  # of a disk that is read-only; what is of an earlier step goes even if nothing took its place
        for other, path in kept_losses(run_folder).items():
            if other not in (0, step):
                path.unlink()


def kept_losses(run_folder: Path) -> dict[int, Path]:
    """Step -> file of `measure_and_keep`, in order."""
    steps = {int(path.stem.removeprefix("step-")): path for path in (run_folder / FOLDER).glob("step-*.npz")}
    return dict(sorted(steps.items()))


def losses_of_set(model: nn.Module, held_out_set: HeldOutSet, batch_size: int, after_batch: AfterBatch) -> DocumentLosses:
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
        documents.hashes[chosen], documents.num_bytes[chosen], nats, num_tokens.astype(np.int64), num_correct.astype(np.int64)
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


def save_losses(path: Path, losses: Mapping[str, DocumentLosses]) -> None:
    """Write the losses of each set to an .npz file, whole or not at all."""
    arrays = {
        f"{number}.{field.name}": vars(of_set)[field.name] for number, of_set in enumerate(losses.values()) for field in fields(of_set)
    }
    content = BytesIO()
    np.savez(content, names=np.array(list(losses), dtype=np.str_), **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    try:
        beside.write_bytes(content.getbuffer())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def load_losses(path: Path) -> dict[str, DocumentLosses]:
    """What `save_losses` wrote.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {
                str(name): DocumentLosses(*(arrays[f"{number}.{field.name}"] for field in fields(DocumentLosses)))
                for number, name in enumerate(arrays["names"])
            }
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as problem:
        raise CheckpointError(f"{path} is damaged ({problem}). Evaluate the model again: cpt evaluate MODEL.") from problem
