"""Rows that several processes share, a part of the tokens on each (DeepSpeed Ulysses); attention swaps parts of rows
for some of the heads.

DeepSpeed's own attention drops whatever says where documents begin, and leaves whole rows to a causal mask: documents
of packed rows would read each other, and windows would be ignored. Here the documents' bounds go through it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cpt.errors import RecipeError
from cpt.models.documents import BOUNDS, LONGEST, add_document_bounds
from cpt.models.varlen_attention import VARLEN

IGNORED = -100
# Their losses and gradients were compared with those of one process, packed; tests/models/test_shared_rows.py has the
# check.
PROVEN = """
    apertus arcee aria_text bitnet cohere cohere2 cohere2_moe cwm ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma
    gemma3_text glm glm4 glm4_moe granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
    internlm3 iquestcoder jais2 kolibri1 laguna llama mellum minimax_m2 minimind2 minimind3 ministral ministral3 mistral mixtral
    nanochat nemotron olmo olmo2 olmo3 olmoe phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe smollm3 solar_open stablelm starcoder2
"""  # noqa: E501


@dataclass(frozen=True)
class PartOfRows:
    """Cuts micro-batches; it can be sent to worker processes.

    Args:
        number: of this process' part, in the order of the tokens.
        parts: processes that share a row.
    """

    number: int
    parts: int

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This process' tokens, each with the label of the next one, which may lie in another part; the documents'
        bounds stay whole.

        Args:
            batch: rows of one length, with `labels` and `position_ids`, and without a mask.
        """
        whole = add_document_bounds(batch)
        documents = {name: whole.pop(name) for name in (BOUNDS, LONGEST)}
        labels = F.pad(whole.pop("labels"), (0, 1), value=IGNORED)[..., 1:]
        cut = {name: self.of(values) for name, values in whole.items()}
        return {**cut, "labels": self.of(labels), "shift_labels": self.of(labels), **documents}

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Its part of each row: [rows, tokens]."""
        return rows.chunk(self.parts, dim=1)[self.number].contiguous()


def check_shared_rows(config: PreTrainedConfig, parts: int, attention: str) -> None:
    """Refuse models that would learn something else from parts of rows.

    Args:
        attention: what the model runs with, by transformers' name.
    """
    key = "`training.parallelism_config.sp_size`"
    values = config.get_text_config().to_dict()
    if attention != VARLEN:
        raise RecipeError(
            f"{key}: with `{attention}` documents of one row would read each other, as DeepSpeed drops the mask that"
            f" keeps them apart. Write `model.attention: {VARLEN}`."
        )
    if config.model_type not in PROVEN.split():
        why = f"whether {config.model_type} learns the same from parts of rows has not been tried"
        raise RecipeError(f"{key}: {why}. Remove it: ZeRO-3 and FSDP2 split any model.")
    if values.get("output_router_logits") and values.get("router_aux_loss_coef"):
        remedy = "Write `model.config.router_aux_loss_coef: 0.0`"
        raise RecipeError(f"{key}: the experts' balance would be measured on parts of rows. {remedy}.")
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = int(values.get(name) or values["num_attention_heads"])
        if heads % parts:
            raise RecipeError(
                f"{key} is {parts}, which does not divide {config.model_type}'s {heads} `{name}`. Take a divisor of"
                " them."
            )


def attend_over_processes(config: PreTrainedConfig, micro_batch: int, group: Any) -> None:
    """Give whole rows, and the documents' bounds in them, to the attention that the model runs with.

    Args:
        config: of the model, in place of whose attention accelerate has put DeepSpeed's already.
        micro_batch: rows in a batch.
        group: the processes that share them.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (
        UlyssesSPAttentionHF,
    )  # DeepSpeed is imported by runs that use it

    name, text = str(config._attn_implementation), config.get_text_config()
    exchange = UlyssesSPAttentionHF(
        attn=ALL_ATTENTION_FUNCTIONS._global_mapping[name],
        batch_size=micro_batch,
        attn_head_count=text.num_attention_heads,
        attn_head_size=vars(text).get("head_dim") or text.hidden_size // text.num_attention_heads,
        kv_head_count=text.num_key_value_heads,
        num_hidden_layers=text.num_hidden_layers,
        process_group=group,
        seq_length_is_variable=True,
        disable_in_eval=True,
    )

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # in each layer it gathers positions, for kernels that go by them; one number is enough where bounds do that
        if module.training:
            options["position_ids"] = torch.zeros(1, 1, dtype=torch.int64, device=query.device)
        attended: tuple[torch.Tensor, torch.Tensor | None] = exchange(
            module, query, key, value, attention_mask, **options
        )
        return attended

    ALL_ATTENTION_FUNCTIONS[name] = attention
