"""Vocabulary rows for new tokens: initialize them from the rows of their pieces, train them by Token Distillation
(arXiv 2505.20133), and train only them if the recipe says so.

Token Distillation: replacing each new token by its pieces gives the same text in old tokens. The model's hidden states
after the pieces are the target, and the new tokens' input rows are trained until the states after them are close.
"""

import json
from collections.abc import Collection, Mapping, Sequence
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
    spare: int
    """New tokens in previously unused rows of the model."""
    is_tied: bool


@torch.no_grad()
def add_rows(
    model: PreTrainedModel, pieces: Mapping[int, Sequence[int]], num_old: int, multiple: int
) -> Rows:
    """Give each new token the mean of its pieces' rows, in the embedding and in the head.

    Args:
        pieces: id of a new token -> ids of the old tokens that it consists of.
        num_old: ids that the tokenizer had before, the largest plus one.
        multiple: a grown table is rounded up to it; remaining rows get the mean of all old ones.
    """
    embedding, head = tables(model)
    before = embedding.weight.shape[0]
    needed = max(pieces) + 1
    refuse_other_tables(model)
    if needed > before:
        embedding_mean = embedding.weight[:num_old].float().mean(0)
        head_mean = head.weight[:num_old].float().mean(0)
        model.resize_token_embeddings(needed, pad_to_multiple_of=multiple, mean_resizing=False)
        embedding, head = tables(model)
        embedding.weight[before:] = embedding_mean.to(embedding.weight.dtype)
        head.weight[before:] = head_mean.to(head.weight.dtype)
        if head.bias is not None:
            head.bias[before:] = head.bias[:num_old].float().mean().to(head.bias.dtype)
    weights = table_weights(model)
    is_tied = len(weights) == 1
    if head.bias is not None:
        weights.append(head.bias)
    for weight in weights:
        for new_id, parts in pieces.items():
            weight[new_id] = weight[list(parts)].float().mean(0).to(weight.dtype)
    return Rows(
        before=before,
        after=embedding.weight.shape[0],
        spare=sum(new_id < before for new_id in pieces),
        is_tied=is_tied,
    )


def refuse_other_tables(model: PreTrainedModel) -> None:
    """Refuse models with another table of a row per id, such as Gemma 3n's embeddings per layer."""
    embedding, head = tables(model)
    for name, parameter in model.named_parameters():
        if parameter is embedding.weight or parameter is head.weight:
            continue
        has_row_per_id = parameter.dim() == 2 and len(parameter) == len(embedding.weight)
        if has_row_per_id and "embed" in name and "pos" not in name:
            raise RecipeError(
                f"{type(model).__name__} cannot grow: `{name}` is another vocabulary table."
            )


def tables(model: PreTrainedModel) -> tuple[nn.Embedding, nn.Linear]:
    """Return the embedding and the head; both have a row per id."""
    embedding: nn.Module | None = None
    head: nn.Module | None = None
    with suppress(NotImplementedError):
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
    if not all(isinstance(table, nn.Embedding | nn.Linear) for table in (embedding, head)):
        methods = "get_input_embeddings() and get_output_embeddings()"
        raise RecipeError(
            f"{type(model).__name__} must return plain embedding and head tables from {methods}."
        )
    return cast(tuple[nn.Embedding, nn.Linear], (embedding, head))


def table_weights(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return the weights of the embedding and the head; one if they are tied."""
    embedding, head = tables(model)
    if head.weight is embedding.weight:
        return [embedding.weight]
    return [embedding.weight, head.weight]


def new_ids(folder: Path) -> list[int]:
    """Return the ids of tokens added by `cpt tokenizer extend`."""
    try:
        tokens = json.loads((folder / EXTENSION).read_text())["tokens"]
        return [int(token["id"]) for token in tokens]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise RecipeError(
            f"`model.train_only`: {folder} lacks {EXTENSION}, made by: cpt tokenizer extend MODEL"
        ) from problem


def num_new_rows(model: Model, needed: int, saved: int) -> int:
    """Return the rows of tokens that the weights at `model.path` have not learned; 0 for new weights.

    Args:
        needed: rows that the tokenizer needs.
        saved: rows that the weights have.
    """
    if model.from_scratch or model.path is None:
        return 0
    extension = Path(model.path).expanduser() / EXTENSION
    added: list[int] = []
    if extension.is_file() and not json.loads(extension.read_text()).get(TRAINED):
        added = new_ids(extension.parent)
    return len(added) + max(0, needed - saved)


def refuse_untrained_rows(model: PreTrainedModel | PeftModel, num_new: int) -> None:
    """RecipeError if the tables that have new rows are frozen."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    trained = []
    for name, table in {"embedding": embedding, "head": head}.items():
        if table is None or any(parameter.requires_grad for parameter in table.parameters()):
            trained.append(name)
    is_tied = bool(model.config.get_text_config().tie_word_embeddings)
    refuse_frozen_tables(trained, num_new, is_tied=is_tied)


def refuse_frozen_tables(trained: Collection[str], num_new: int, *, is_tied: bool) -> None:
    """RecipeError unless the embedding and the head, or one of them if they are tied, are `trained`."""
    frozen = [name for name in ("embedding", "head") if name not in trained]
    if not frozen or is_tied and len(frozen) == 1:
        return
    subject = "embedding and the head are" if len(frozen) == 2 else f"{frozen[0]} is"
    raise RecipeError(
        f"the tokenizer has {num_new:,} tokens that the model has not learned, and their rows would never be trained:"
        f" the {subject} frozen. Train them with the adapters (`model.lora: cpt`), or alone first"
        " (`model.train_only: new_rows`, after cpt tokenizer extend), or train all parameters."
    )


def carry_extension(path: str | None, folder: Path, *, trained: bool = False) -> None:
    """Copy the list of new tokens of the model at `path`, if it has one, to the weights derived from it. `trained`:
    these have learned the new tokens."""
    if path is None:
        return
    extension = Path(path).expanduser() / EXTENSION
    if not extension.is_file():
        return
    content = json.loads(extension.read_text())
    if trained:
        content[TRAINED] = True
    (folder / EXTENSION).write_text(json.dumps(content, indent=1, ensure_ascii=False))


def train_only_rows(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Freeze all other rows of the embedding and the head. Their gradients are zeroed before anything sums, clips or
    shards them: AdamW's moments and steps stay exactly zero there. Weight decay would still shrink these rows, so it
    is disabled for these parameters."""
    for weight in table_weights(model):
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
    sequences = [list(tokens) for tokens in sequences if not pieces.keys().isdisjoint(tokens)]
    if not sequences:
        return Distilled(before=0.0, after=0.0, steps=0)
    rows = nn.Parameter(embedding.weight[ids].float().detach().clone())
    distance = StateDistance(model, embedding, ids, rows, pieces)
    measured = sequences[: 4 * SEQUENCES]
    model.eval().requires_grad_(False)
    with torch.no_grad():
        before = float(distance(measured))
    root_mean_square = rows.detach().square().mean().sqrt().item()
    optimizer = torch.optim.Adam([rows], lr=LEARNING_RATE * root_mean_square)
    steps = -(-len(sequences) // SEQUENCES)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in range(steps):
        distance(sequences[step * SEQUENCES : (step + 1) * SEQUENCES]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        after = float(distance(measured))
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


class StateDistance:
    """Distance of sequences' last hidden states to those of the same text in old tokens, relative to their norm."""

    def __init__(
        self,
        model: PreTrainedModel,
        embedding: nn.Embedding,
        ids: torch.Tensor,  # (R,), ids of the new tokens
        rows: torch.Tensor,  # (R, D), their input rows
        pieces: Mapping[int, Sequence[int]],
    ) -> None:
        self.model = model
        self.embedding = embedding
        self.rows = rows
        self.pieces = pieces
        self.device = embedding.weight.device
        self.row_of_id = torch.full((embedding.num_embeddings,), -1, device=self.device)
        """Index in `rows` by token id; -1 for old tokens."""
        self.row_of_id[ids] = torch.arange(len(ids), device=self.device)

    def __call__(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        old_sequences = []
        ends = []  # of each sequence: where its tokens end in old tokens
        for tokens in sequences:
            old_tokens = [list(self.pieces.get(token, (token,))) for token in tokens]
            old_sequences.append(list(chain.from_iterable(old_tokens)))
            ends.append(torch.tensor(list(map(len, old_tokens))).cumsum(0) - 1)
        with torch.no_grad():
            old_states = self.states(padded(old_sequences))
        states = self.states(padded(sequences))
        distances = []
        for index, tokens in enumerate(sequences):
            # Both are equal before the first new token.
            first = next(at for at, token in enumerate(tokens) if token in self.pieces)
            target = old_states[index, ends[index][first:]]
            difference = states[index, first : len(tokens)] - target
            distances.append(difference.square().sum(-1) / target.square().sum(-1))
        return torch.cat(distances).mean()

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """[S, T] -> [S, T, D], with the trained rows in the place of the embedding's."""
        tokens = tokens.to(self.device)
        index = self.row_of_id[tokens]
        new = self.rows[index.clamp(min=0)].to(self.embedding.weight.dtype)
        inputs = torch.where((index >= 0)[..., None], new, self.embedding(tokens))
        hidden: torch.Tensor = self.model.base_model(
            inputs_embeds=inputs, use_cache=False
        ).last_hidden_state
        return hidden.float()


def padded(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Pad at the ends, which does not affect earlier tokens in a causal model."""
    tensors = list(map(torch.tensor, sequences))
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True)
