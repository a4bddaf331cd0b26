"""Loss, perplexity and bits per byte on held-out documents: the first figures that continued pre-training is judged by."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cpt.data.held_out import HeldOutSet
from cpt.data.rows import stack_rows
from cpt.errors import DataError

POSITIONS_AT_ONCE = 1024  # of logits in fp32: 1 GiB for a vocabulary of 256k, which a whole row of 8,192 would take eight of


def evaluate_held_out(model: nn.Module, held_out: Mapping[str, HeldOutSet], *, batch_size: int) -> dict[str, float]:
    """Measure the model on each held-out set, over all processes of the run; every one gets the same figures.

    Bits per byte are the bits that the model needs for the documents, over their UTF-8 bytes: comparable between tokenizers, as loss
    and perplexity (per token) are not. The first token of a document, or of a part of one longer than a row, is not predicted and costs
    nothing; of a document it is the begin token where the tokenizer adds one.

    Args:
        model: plain, a PeftModel, or wrapped by DDP or DeepSpeed. Its mode and the random state are left as they were.
        batch_size: rows in one forward pass; the figures do not depend on it.

    Returns:
        `{name}_loss` (nats per token), `{name}_perplexity`, `{name}_bits_per_byte`, and `{name}_tokens` (predicted ones), by set.

    Raises:
        DataError: a set has nothing to predict.
    """
    figures: dict[str, float] = {}
    with evaluation_mode(model):
        for name, held_out_set in held_out.items():
            nll, num_tokens = total_nll(model, held_out_set, batch_size)
            if not num_tokens:
                raise DataError(
                    f"the held-out set `{name}` has no document of two tokens or more, so there is nothing to predict. Give it text."
                )
            loss = nll / num_tokens
            figures[f"{name}_loss"] = loss
            figures[f"{name}_perplexity"] = math.exp(loss) if loss < 700 else math.inf  # beyond it float64 overflows
            figures[f"{name}_bits_per_byte"] = nll / math.log(2) / held_out_set.num_bytes
            figures[f"{name}_tokens"] = num_tokens
    return figures


def total_nll(model: nn.Module, held_out_set: HeldOutSet, batch_size: int) -> tuple[float, int]:
    """Negative log-likelihood (nats) of all predicted tokens of the set, and their number, summed over the processes."""
    # DDP's own forward would synchronise buffers; DeepSpeed's gathers the parameters and must stay.
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    device = next(model.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    is_batch = held_out_set.rows[0]["input_ids"].dim() == 2  # a row of a token budget
    for rows, counts in batches(held_out_set, 1 if is_batch else batch_size):
        batch = {key: values.to(device) for key, values in stack_rows(rows).items()}
        labels = batch.pop("labels")
        # A cache would make transformers ignore where documents begin. So would a mask, which packed rows do not have.
        logits = inner(**batch, use_cache=False).logits
        if counts:
            sums += batch_nll(logits, labels)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(sums)
    return sums[0].item(), int(sums[1].item())


def batches(held_out_set: HeldOutSet, batch_size: int) -> Iterator[tuple[list[dict[str, torch.Tensor]], bool]]:
    """This process' rows in batches, each with whether it counts.

    Every process gets the same number of batches, as ZeRO-3's gathering of parameters needs: one that has run out of rows repeats row 0.
    """
    parallel = dist.is_available() and dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if parallel else (0, 1)
    num_rows = len(held_out_set.rows)
    mine = range(rank, num_rows, world_size)
    for number in range(math.ceil(math.ceil(num_rows / world_size) / batch_size)):
        indexes = mine[number * batch_size : (number + 1) * batch_size]
        yield [held_out_set.rows[i] for i in indexes or (0,)], bool(indexes)


def batch_nll(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(sum of the negative log-likelihoods, number of predicted tokens) in float64; logits [B, T, V] predict the label one to the right."""
    sums = torch.zeros(2, dtype=torch.float64, device=logits.device)
    for row_logits, row_labels in zip(logits, labels, strict=True):
        for start in range(0, len(row_labels) - 1, POSITIONS_AT_ONCE):
            targets = row_labels[start + 1 : start + 1 + POSITIONS_AT_ONCE]
            chunk = row_logits[start : start + len(targets)].float()
            sums[0] += F.cross_entropy(chunk, targets, ignore_index=-100, reduction="none").double().sum()
            sums[1] += (targets != -100).sum()
    return sums


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout and no gradients inside; afterwards each module trains or not as before (a frozen part may have been in eval mode)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
