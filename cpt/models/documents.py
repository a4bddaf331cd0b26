"""Where the documents of packed rows begin and end: found once a batch, handed to the attention of every layer in the
place of a mask, also where several processes share a row (DeepSpeed Ulysses, whose own attention drops the mask, so
that documents would read each other)."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cpt.errors import RecipeError
from cpt.hf_internals import attention_of
from cpt.models.attention import VARLEN, VARLEN_NAMES
from cpt.models.fused_loss import next_tokens
from cpt.models.inventory import runs_along_the_row
from cpt.torch_internals import mark_dynamic

BOUNDS, LONGEST = "cu_seq_lens_q", "max_length_q"  # transformers' names
FEWEST_BOUNDS = 32
FEWEST_TOKENS = 128  # of the longest document; kernels compute blocks of so many
# Share of the largest logit. bf16 rounds by 0.004, and kernels for several lengths add up in another order.
TOLERANCE = 0.02
# Packed losses and gradients were compared with those of one process: tests/models/test_shared_rows.py.
PROVEN_SHARED = """
    apertus arcee aria_text bitnet cohere cohere2 cohere2_moe cwm ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo
    gemma gemma3_text glm glm4 glm4_moe granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe
    hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna llama mellum minimax_m2 minimind2 minimind3
    ministral ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe phi phi3 qwen2 qwen2_moe qwen3
    qwen3_moe smollm3 solar_open stablelm starcoder2
"""


def document_bounds(position_ids: torch.Tensor) -> torch.Tensor:
    """Where each document begins among the tokens of all rows laid end to end, and where the last one ends, int32.

    As in transformers' masks, a document begins with each row, and wherever a position does not follow from the one
    before. The last number is repeated up to a power of two, for few different shapes: to kernels these are documents
    without tokens. Not further than that: flash kernels keep 128 rows free for each in the backward pass. Empty where
    each row is one document, which causal attention needs no bounds for. Positions are [rows, tokens].
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
    """The batch with its bounds, unless it has a mask or no positions, and with the length of its longest document,
    rounded up to a power of two: kernels start that many blocks for each document."""
    positions = batch.get("position_ids")
    if positions is None or positions.dim() != 2 or batch.get("attention_mask") is not None:
        return batch
    bounds = document_bounds(positions)
    longest = int(bounds.diff().max()) if len(bounds) else positions.shape[1]
    return {**batch, BOUNDS: bounds, LONGEST: max(FEWEST_TOKENS, 2 ** (longest - 1).bit_length())}


def hand_over_documents(
    model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of a model without its head: bounds, of the batch or its positions, instead of a mask.

    transformers passes a mask of four dimensions on as it is, and every layer's attention gets it, also where layers
    drop other arguments and where gradient checkpointing runs a layer again. The longest document's length is a
    dimension of it, without memory: a number would need a graph for each length. Rows with a mask, or with a cache of
    keys and values, are left alone.
    """
    given = dict(keywords)
    bounds, longest, positions = given.pop(BOUNDS, None), given.pop(LONGEST, None), given.get("position_ids")
    has_mask = given.get("attention_mask") is not None or given.get("past_key_values") is not None
    if has_mask or positions is None or positions.dim() != 2:
        return arguments, given
    if bounds is None:
        inputs = [given.get("input_ids"), given.get("inputs_embeds"), *arguments]
        rows = next(len(values) for values in inputs if values is not None)
        bounds = document_bounds(positions.expand(rows, -1))
    mask = bounds.expand(1, 1, longest or positions.shape[1], -1)
    mark_dynamic(mask, [2, 3])  # one graph for any number and any length of documents
    given["attention_mask"] = mask
    return arguments, given


def keep_documents_apart(model: PreTrainedModel) -> None:
    check_documents_can_be_handed_over(model)
    model.base_model.register_forward_pre_hook(hand_over_documents, with_kwargs=True)
    model.base_model.hands_over_documents = True  # type: ignore[assignment]


def check_documents_can_be_handed_over(model: PreTrainedModel) -> None:
    if runs_along_the_row(model):
        why = f"varlen cannot keep documents apart in {model.config.model_type}'s recurrent layers"
        raise RecipeError(f"model.attention: {why}. Use sdpa, with `data.packing: token_budget` or `none`.")


def try_documents_apart(model: PreTrainedModel) -> None:
    """Compare two documents in one row with each of them alone, where the class says that it keeps them apart."""
    embedding = model.get_input_embeddings().get_parameter("weight")
    ids = torch.arange(1, 9, device=embedding.device).unsqueeze(0) % len(embedding)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]], device=embedding.device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        parts = (slice(None), slice(0, 5), slice(5, 8))
        together, first, second = (model(input_ids=ids[:, p], position_ids=positions[:, p]).logits for p in parts)
    alone = torch.cat([first, second], dim=1)
    model.train(was_training)
    largest = float((together - alone).abs().max())
    if not largest <= TOLERANCE * float(alone.abs().max()):
        leak = f"the second document of a row sees the first: logits differ by {largest:.2g}"
        raise RecipeError(f"{type(model).__name__} says `keeps_documents_apart`, but {leak}. Fix its forward.")


def wants_bounds(model: nn.Module | None) -> bool:
    """Whether batches should bring them: the hook is there, and the model takes further arguments."""
    whole = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(whole, PreTrainedModel) or "hands_over_documents" not in vars(whole.base_model):
        return False
    return any(one.kind is one.VAR_KEYWORD for one in inspect.signature(whole.forward).parameters.values())


# --- rows that several processes share ------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartOfRows:
    """Cuts micro-batches; it can be sent to worker processes."""

    number: int  # of this process' part, in the order of the tokens
    parts: int

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This process' tokens, each with the label of the next one, also of another part; the bounds stay whole."""
        whole = add_document_bounds(batch)
        documents = {name: whole.pop(name) for name in (BOUNDS, LONGEST)}
        labels = next_tokens(whole.pop("labels"))
        whole |= {"labels": labels, "shift_labels": labels}
        cut = {name: rows.chunk(self.parts, dim=1)[self.number].contiguous() for name, rows in whole.items()}
        return cut | documents


def check_shared_rows(config: PreTrainedConfig, parts: int, attention: str) -> None:
    """Refuse models that would learn something else from parts of rows."""
    key = "`training.parallelism_config.sp_size`"
    values = config.get_text_config().to_dict()
    if attention not in VARLEN_NAMES:
        raise RecipeError(f"{key}: `{attention}` mixes documents of one row. Write `model.attention: {VARLEN}`.")
    if config.model_type not in PROVEN_SHARED.split():
        why = f"whether {config.model_type} learns the same from parts of rows has not been tried"
        raise RecipeError(f"{key}: {why}. Remove it: ZeRO-3 and FSDP2 split any model.")
    if values.get("output_router_logits") and values.get("router_aux_loss_coef"):
        remedy = "Write `model.config.router_aux_loss_coef: 0.0`"
        raise RecipeError(f"{key}: the experts' balance would be measured on parts of rows. {remedy}.")
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = int(values.get(name) or values["num_attention_heads"])
        if heads % parts:
            raise RecipeError(f"{key} is {parts}, which does not divide {config.model_type}'s {heads} `{name}`.")


def attend_over_processes(config: PreTrainedConfig, micro_batch: int, group: Any) -> None:
    """Give whole rows, and the documents' bounds in them, to the attention that the model runs with, in the place of
    DeepSpeed's own, which accelerate has put there."""
    from deepspeed.runtime.sequence_parallel import ulysses_sp  # DeepSpeed is imported by runs that use it

    name, text = attention_of(config), config.get_text_config()
    exchange = ulysses_sp.UlyssesSPAttentionHF(
        attn=AttentionInterface()[name],  # a new object has what is registered, without accelerate's change
        batch_size=micro_batch,
        attn_head_count=text.num_attention_heads,
        attn_head_size=vars(text).get("head_dim") or text.hidden_size // text.num_attention_heads,
        kv_head_count=text.num_key_value_heads,
        num_hidden_layers=text.num_hidden_layers,
        process_group=group,
        seq_length_is_variable=True,
        disable_in_eval=True,
    )

    def attention(module: nn.Module, query: torch.Tensor, *others: Any, **options: Any) -> Any:
        # In each layer it gathers positions, for kernels that need them; one number is enough where bounds do that.
        if module.training:
            options["position_ids"] = torch.zeros(1, 1, dtype=torch.int64, device=query.device)
        return exchange(module, query, *others, **options)

    ALL_ATTENTION_FUNCTIONS[name] = attention
