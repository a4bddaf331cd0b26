"""Where the documents of a batch begin and end, found once a batch, and handed to the attention of every layer in the
place of a mask."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from cpt.errors import RecipeError
from cpt.models.inventory import runs_along_the_row

BOUNDS, LONGEST = "cu_seq_lens_q", "max_length_q"  # transformers' names
FEWEST_BOUNDS = 32
FEWEST_TOKENS = 128  # of the longest document; kernels compute blocks of so many
PARTS = (slice(0, 5), slice(5, 8))  # the documents of a trial
# Share of the largest logit. bf16 rounds by 0.004, and kernels for several lengths add up in another order.
TOLERANCE = 0.02


def document_bounds(position_ids: torch.Tensor) -> torch.Tensor:
    """Where each document begins among the tokens of all rows laid end to end, and where the last one ends.

    As in transformers' masks, a document begins with each row, and wherever a position does not follow from the one
    before. The last number is repeated up to a power of two, for few different shapes: to kernels these are documents
    without tokens. Not further than that: flash kernels keep 128 rows free for each in the backward pass.

    Args:
        position_ids: [rows, tokens].

    Returns:
        int32, at least FEWEST_BOUNDS of them; empty where each row is one document, which causal attention needs no
        bounds for.
    """
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff(dim=1) != 1
    first = begins.flatten().nonzero().flatten()
    if len(first) == len(position_ids):
        return torch.empty(0, dtype=torch.int32, device=position_ids.device)
    size = max(FEWEST_BOUNDS, 2 ** len(first).bit_length())
    bounds = torch.full((size,), position_ids.numel(), dtype=torch.int32, device=position_ids.device)
    bounds[: len(first)] = first
    return bounds


def add_document_bounds(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with its bounds, found where the batch is made; one with a mask, or without positions, as it is.

    With them comes the length of the longest document, rounded up to a power of two: kernels start that many blocks
    for each document.
    """
    positions = batch.get("position_ids")
    if positions is None or positions.dim() != 2 or batch.get("attention_mask") is not None:
        return batch
    bounds = document_bounds(positions)
    longest = int(bounds.diff().max()) if len(bounds) else positions.shape[1]
    return {**batch, BOUNDS: bounds, LONGEST: max(FEWEST_TOKENS, 2 ** (longest - 1).bit_length())}


def hand_over_documents(
    model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of a model without its head: bounds instead of a mask, from the batch, or else from the
    positions.

    transformers passes a mask of four dimensions on as it is, and every layer's attention gets it: also where layers
    drop other arguments, and where gradient checkpointing runs a layer again in the backward pass. The longest
    document's length is a dimension of it, without
    memory: a number would make a graph of its own for each length. Nothing is remembered between batches. With a mask,
    or a cache of keys and values, attention is left to the mask, as everywhere in transformers.
    """
    given = dict(keywords)
    bounds, longest, positions = given.pop(BOUNDS, None), given.pop(LONGEST, None), given.get("position_ids")
    has_mask = given.get("attention_mask") is not None or given.get("past_key_values") is not None
    if has_mask or positions is None or positions.dim() != 2:
        return arguments, given
    if bounds is None:
        inputs = next(
            value for value in (given.get("input_ids"), given.get("inputs_embeds"), *arguments) if value is not None
        )
        bounds = document_bounds(positions.expand(inputs.shape[0], -1))
    mask = bounds.expand(1, 1, longest or positions.shape[1], -1)
    torch._dynamo.maybe_mark_dynamic(mask, [2, 3])  # one graph for any number and any length of documents
    given["attention_mask"] = mask
    return arguments, given


def takes_bounds(mask: torch.Tensor | None) -> bool:
    """Whether what an attention function got as its mask are bounds: true masks are of booleans or fractions."""
    return mask is not None and mask.dtype == torch.int32


def keep_documents_apart(model: PreTrainedModel) -> None:
    """Install the hook that hands the bounds over."""
    check_documents_can_be_handed_over(model)
    model.base_model.register_forward_pre_hook(hand_over_documents, with_kwargs=True)


def check_documents_can_be_handed_over(model: PreTrainedModel) -> None:
    if runs_along_the_row(model):
        raise RecipeError(
            f"model.attention: varlen keeps documents apart in attention, and {model.config.model_type} has layers"
            " that read a row from end to end. Use `model.attention: sdpa`, with `data.packing: token_budget` or"
            " `none`."
        )


def try_documents_apart(model: PreTrainedModel) -> None:
    """Compare two documents in one row with each of them alone, where the class says that it keeps them apart."""
    embedding = model.get_input_embeddings().get_parameter("weight")
    ids = torch.arange(1, 9, device=embedding.device).unsqueeze(0) % len(embedding)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]], device=embedding.device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        together = model(input_ids=ids, position_ids=positions).logits
        alone = torch.cat(
            [model(input_ids=ids[:, part], position_ids=positions[:, part]).logits for part in PARTS], dim=1
        )
    model.train(was_training)
    largest = float((together - alone).abs().max())
    if not largest <= TOLERANCE * float(alone.abs().max()):
        raise RecipeError(
            f"{type(model).__name__} says `keeps_documents_apart`, but the second document of a row sees the first:"
            f" logits differ by {largest:.2g} from those of the document alone. Mend its forward, or write"
            " `data.packing: token_budget`."
        )


def wants_bounds(model: nn.Module | None) -> bool:
    """Whether batches should bring them: the hook is there, and the model takes further arguments to hand them on."""
    whole = model.get_base_model() if isinstance(model, PeftModel) else model
    if (
        not isinstance(whole, PreTrainedModel)
        or hand_over_documents not in whole.base_model._forward_pre_hooks.values()
    ):
        return False
    return any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(whole.forward).parameters.values()
    )
