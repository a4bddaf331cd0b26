"""Vocabulary rows for new tokens: initialize them from the rows of their pieces, train them by Token Distillation
(arXiv 2505.20133), and train only them if the recipe says so.

Token Distillation: replacing each new token by its pieces gives the same text in old tokens. The model's hidden states
after the pieces are the target, and the new tokens' input rows are trained until the states after them are close.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from cpt.errors import RecipeError
from cpt.models.config import EXTENSION
from cpt.recipe.schema import Model

TRAINED = "trained"  # its key in weights that have learned the tokens
# Set on a parameter whose frozen rows weight decay must not touch; `cpt.optim.groups` reads it.
UNDECAYED = "without_weight_decay"


@dataclass(frozen=True)
class Rows:
    before: int
    after: int
    spare: int  # new tokens in previously unused rows of the model
    is_tied: bool


@torch.no_grad()
def add_rows(
    model: PreTrainedModel, pieces: Mapping[int, Sequence[int]], known: int, multiple: int
) -> Rows:
    """Give each new token the mean of its pieces' rows, in the embedding and in the head.

    Args:
        pieces: id of a new token -> ids of the old tokens that it consists of.
        known: ids that the tokenizer had before, the largest plus one.
        multiple: a grown table is rounded up to it; remaining rows get the mean of all old ones.
    """
    embedding, head = tables(model)
    before = embedding.weight.shape[0]
    needed = max(pieces) + 1
    for name, parameter in model.named_parameters():  # such as Gemma 3n's embeddings per layer
        is_table = (
            parameter.dim() == 2
            and parameter.shape[0] == before
            and "embed" in name
            and "pos" not in name
        )
        if is_table and parameter is not embedding.weight and parameter is not head.weight:
            raise RecipeError(
                f"{type(model).__name__} cannot grow: `{name}` is another vocabulary table."
            )
    if needed > before:
        means = [weight[:known].float().mean(0) for weight in (embedding.weight, head.weight)]
        model.resize_token_embeddings(needed, pad_to_multiple_of=multiple, mean_resizing=False)
        embedding, head = tables(model)
        for weight, mean in zip((embedding.weight, head.weight), means, strict=True):
            weight[before:] = mean.to(weight.dtype)
        if head.bias is not None:
            head.bias[before:] = head.bias[:known].float().mean().to(head.bias.dtype)
    distinct = {id(table.weight): table.weight for table in (embedding, head)}
    for weight in [*distinct.values(), *([head.bias] if head.bias is not None else [])]:
        for number, parts in pieces.items():
            weight[number] = weight[list(parts)].float().mean(0).to(weight.dtype)
    return Rows(
        before,
        embedding.weight.shape[0],
        sum(number < before for number in pieces),
        len(distinct) == 1,
    )


def tables(model: PreTrainedModel) -> tuple[nn.Embedding, nn.Linear]:
    """Return the embedding and the head; both have a row per id."""
    found: tuple[nn.Module | None, ...] = ()
    with suppress(NotImplementedError):
        found = model.get_input_embeddings(), model.get_output_embeddings()
    if not found or not all(isinstance(table, nn.Embedding | nn.Linear) for table in found):
        found_by = "get_input_embeddings() and get_output_embeddings()"
        raise RecipeError(
            f"{type(model).__name__} must return plain embedding and head tables from {found_by}."
        )
    return cast(tuple[nn.Embedding, nn.Linear], found)


def new_ids(folder: Path) -> list[int]:
    """Return the ids of tokens added by `cpt tokenizer extend`."""
    try:
        return [
            int(token["id"]) for token in json.loads((folder / EXTENSION).read_text())["tokens"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        made = "made by: cpt tokenizer extend MODEL"
        raise RecipeError(f"`model.train_only`: {folder} lacks {EXTENSION}, {made}") from problem


def num_new_rows(model: Model, needed: int, known: int) -> int:
    """Rows of tokens that the weights at `model.path` have not learned; 0 for new weights.

    Args:
        needed: rows that the tokenizer needs.
        known: rows that the weights have.
    """
    if model.from_scratch or model.path is None:
        return 0
    listed = Path(model.path).expanduser() / EXTENSION
    added: list[int] = []
    if listed.is_file() and not json.loads(listed.read_text()).get(TRAINED):
        added = new_ids(listed.parent)
    return len(added) + max(0, needed - known)


def refuse_untrained_rows(model: PreTrainedModel | PeftModel, num_new: int) -> None:
    """RecipeError if the tables that have new rows are frozen."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    trained = []
    for name, table in {"embedding": embedding, "head": head}.items():
        if table is None or any(one.requires_grad for one in table.parameters()):
            trained.append(name)
    is_tied = bool(model.config.get_text_config().tie_word_embeddings)
    refuse_frozen_tables(trained, num_new, is_tied=is_tied)


def refuse_frozen_tables(trained: Collection[str], num_new: int, *, is_tied: bool) -> None:
    """RecipeError unless the embedding and the head, or one of them if they are tied, are `trained`."""
    frozen = [name for name in ("embedding", "head") if name not in trained]
    if not frozen or is_tied and len(frozen) == 1:
        return
    raise RecipeError(
        f"the tokenizer has {num_new:,} tokens that the model has not learned, and their rows would never be trained:"
        f" the {' and the '.join(frozen)} {'is' if len(frozen) == 1 else 'are'} frozen. Train them with the adapters"
        " (`model.lora: cpt`), or alone first (`model.train_only: new_rows`, after cpt tokenizer extend), or train all"
        " parameters."
    )


def carry_extension(path: str | None, folder: Path, *, trained: bool = False) -> None:
    """Copy the list of new tokens of the model at `path`, if it has one, to the weights derived from it. `trained`:
    these have learned the new tokens."""
    listed = None if path is None else Path(path).expanduser() / EXTENSION
    if listed is None or not listed.is_file():
        return
    content = json.loads(listed.read_text())
    if trained:
        content[TRAINED] = True
    (folder / EXTENSION).write_text(json.dumps(content, indent=1, ensure_ascii=False))


def train_only_rows(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Freeze all other rows of the embedding and the head. Their gradients are zeroed before anything sums, clips or
    shards them: AdamW's moments and steps stay exactly zero there. Weight decay would still shrink these rows, so it
    is disabled for these parameters."""
    for weight in {id(table.weight): table.weight for table in tables(model)}.values():
        setattr(weight, UNDECAYED, True)
        weight.register_hook(KeptRows(sorted(ids)))


class KeptRows:
    """A hook of a table's gradient that zeroes all other rows, including NaN."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = torch.tensor(ids)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self.ids = self.ids.to(gradient.device)  # once: for a copy to a GPU the host waits
        return torch.zeros_like(gradient).index_copy_(0, self.ids, gradient[self.ids])


# --- Token Distillation ----------------------------------------------------------------------------------------------

LEARNING_RATE = 0.03  # initial rate, relative to the rows' root mean square; decays to zero
SEQUENCES = 8  # per step


@dataclass(frozen=True)
class Distilled:
    """Distance of the states to those of the old tokens, relative to their norm."""

    before: float
    after: float
    steps: int


def distill_rows(
    model: PreTrainedModel, pieces: Mapping[int, Sequence[int]], sequences: Sequence[Sequence[int]]
) -> Distilled:
    """Train the new tokens' input rows, initialized by `add_rows`, on sequences that contain them."""
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
    embedding, head = tables(model)
    if embedding.weight is head.weight:
        raise RecipeError("token distillation needs an untied head. Use --rows mean.")
    if type(embedding) is not nn.Embedding:
        raise RecipeError(
            f"token distillation does not support {type(embedding).__name__}. Use --rows mean."
        )


def distance(
    model: PreTrainedModel,
    embedding: nn.Embedding,
    ids: torch.Tensor,
    rows: torch.Tensor,
    pieces: Mapping[int, Sequence[int]],
) -> Callable[[Sequence[Sequence[int]]], torch.Tensor]:
    """Return a function: distance of sequences' last hidden states to those of the same text in old tokens."""
    device = embedding.weight.device
    place = torch.full((embedding.num_embeddings,), -1, device=device)
    place[ids] = torch.arange(len(ids), device=device)

    def states(tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.to(device)
        found = place[tokens]
        new = rows[found.clamp(min=0)].to(embedding.weight.dtype)
        looked_up = torch.where((found >= 0)[..., None], new, embedding(tokens))
        hidden: torch.Tensor = model.base_model(
            inputs_embeds=looked_up, use_cache=False
        ).last_hidden_state
        return hidden.float()

    def far(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        spelled = [[list(pieces.get(token, (token,))) for token in one] for one in sequences]
        ends = [torch.tensor([len(part) for part in one]).cumsum(0) - 1 for one in spelled]
        with torch.no_grad():
            known = states(padded([list(chain.from_iterable(one)) for one in spelled]))
        found = states(padded(sequences))
        parts = []
        for row, (one, end) in enumerate(zip(sequences, ends, strict=True)):
            first = next(
                number for number, token in enumerate(one) if token in pieces
            )  # both are equal before it
            wanted = known[row, end[first:]]
            parts.append(
                (found[row, first : len(one)] - wanted).square().sum(-1) / wanted.square().sum(-1)
            )
        return torch.cat(parts).mean()

    return far


def padded(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Pad at the ends, which does not affect earlier tokens in a causal model."""
    return nn.utils.rnn.pad_sequence([torch.tensor(one) for one in sequences], batch_first=True)
