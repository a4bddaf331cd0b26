"""Better input rows for new tokens, taught by what the model makes of the same text in old tokens (Token Distillation,
arXiv 2505.20133).

A text in new tokens, each replaced by its pieces, is the same text in old tokens. So the model's states behind the
pieces are known, and the new tokens' rows are trained until the states behind them come near. No other number of the
model changes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from cpt.errors import RecipeError
from cpt.models.new_rows import tables

LEARNING_RATE = 0.03  # of the rows' own size (root mean square of their numbers), at the beginning; it falls to zero
SEQUENCES = 8  # in one step
IGNORED = 0  # fills shorter sequences up; nothing looks at what stands there


@dataclass(frozen=True)
class Distilled:
    """How far the states lay from those of the old tokens, relative to their size, before and after."""

    before: float
    after: float
    steps: int


def distill_rows(
    model: PreTrainedModel, pieces: Mapping[int, Sequence[int]], sequences: Sequence[Sequence[int]]
) -> Distilled:
    """Train the new tokens' input rows on sequences that hold them, once through.

    Args:
        pieces: id of a new token -> ids of the old tokens that it consists of; their rows are there already
            (`add_rows`).
        sequences: ids of texts in new tokens.
    """
    check_can_distill(model)
    embedding, _ = tables(model)
    ids = torch.tensor(sorted(pieces))
    chosen = [list(one) for one in sequences if not pieces.keys().isdisjoint(one)]
    if not chosen:
        return Distilled(0.0, 0.0, 0)
    rows = nn.Parameter(embedding.weight[ids].float().detach().clone())
    far = distance(model, embedding, ids, rows, pieces)
    held = chosen[: 4 * SEQUENCES]
    model.eval().requires_grad_(False)
    with torch.no_grad():
        before = float(far(held))
    size = rows.detach().square().mean().sqrt().item()
    optimizer = torch.optim.Adam([rows], lr=LEARNING_RATE * size)
    steps = -(-len(chosen) // SEQUENCES)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in range(steps):
        far(chosen[step * SEQUENCES : (step + 1) * SEQUENCES]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        after = float(far(held))
        embedding.weight[ids] = rows.to(embedding.weight.dtype)
    model.requires_grad_(True)
    return Distilled(before, after, steps)


def check_can_distill(model: PreTrainedModel) -> None:
    """Refuse a model whose input rows cannot be taught this way."""
    embedding, head = tables(model)
    if embedding.weight is head.weight:
        raise RecipeError(
            "token distillation makes input rows, and this model's head shares them (tied). Use the mean: --rows mean."
        )
    if type(embedding) is not nn.Embedding:
        raise RecipeError(f"token distillation does not know {type(embedding).__name__}. Use the mean: --rows mean.")


def distance(
    model: PreTrainedModel,
    embedding: nn.Embedding,
    ids: torch.Tensor,
    rows: torch.Tensor,
    pieces: Mapping[int, Sequence[int]],
) -> Callable[[Sequence[Sequence[int]]], torch.Tensor]:
    """How far the last hidden states of sequences lie from those of the same text in old tokens, where they can
    differ."""
    device = embedding.weight.device
    place = torch.full((embedding.num_embeddings,), -1, device=device)
    place[ids] = torch.arange(len(ids), device=device)

    def states(tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.to(device)
        found = place[tokens]
        looked_up = torch.where(
            (found >= 0)[..., None], rows[found.clamp(min=0)].to(embedding.weight.dtype), embedding(tokens)
        )
        hidden: torch.Tensor = model.base_model(inputs_embeds=looked_up, use_cache=False).last_hidden_state
        return hidden.float()

    def far(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        spelled = [[list(pieces.get(token, (token,))) for token in one] for one in sequences]
        ends = [torch.tensor([len(part) for part in one]).cumsum(0) - 1 for one in spelled]
        with torch.no_grad():
            known = states(padded([torch.tensor([piece for part in one for piece in part]) for one in spelled]))
        found = states(padded([torch.tensor(one) for one in sequences]))
        parts = []
        for row, (one, end) in enumerate(zip(sequences, ends, strict=True)):
            first = next(number for number, token in enumerate(one) if token in pieces)  # before it, both are the same
            wanted = known[row, end[first:]]
            parts.append((found[row, first : len(one)] - wanted).square().sum(-1) / wanted.square().sum(-1))
        return torch.cat(parts).mean()

    return far


def padded(sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sequences side by side, filled up at their ends, which a causal model does not see from what stands before."""
    return nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=IGNORED)
