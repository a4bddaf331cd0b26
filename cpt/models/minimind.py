"""MiniMind's four models: the dense ones are a Llama and a Qwen3, the mixtures of experts a Llama with shared experts
and a Qwen3-MoE."""

from collections.abc import Callable
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoePreTrainedModel,
    Qwen3MoeSparseMoeBlock,
    Qwen3MoeTopKRouter,
)
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder

from cpt.hf_internals import SettableExperts


class MiniMind2Config(LlamaConfig):
    """MiniMind2 (github.com/jingyaogong/minimind at c090b69); the defaults are its 104M model."""

    model_type = "minimind2"
    default_theta = 1e6

    vocab_size: int = 6400
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 2
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True


class MiniMind2ForCausalLM(LlamaForCausalLM):
    config: MiniMind2Config


@strict
class MiniMind3Config(Qwen3Config):
    """MiniMind-3 (github.com/jingyaogong/minimind at d65ef2c); the defaults are its 64M model."""

    model_type = "minimind3"
    default_theta = 1e6

    vocab_size: int = 6400
    hidden_size: int = 768
    intermediate_size: int = 2432  # hidden * pi, rounded up to a multiple of 64
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = None  # type: ignore[assignment]  # hidden / heads, as in MiniMind
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs: object) -> None:
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


class MiniMind3ForCausalLM(Qwen3ForCausalLM):
    config: MiniMind3Config


def balance_loss(
    router_logits: tuple[torch.Tensor, ...], top_k: int, num_sequences: int
) -> torch.Tensor:
    """Return the balance loss of experts, without a coefficient: 1 per layer with perfectly even use.

    Per layer, whose router logits are [B x T, E]: experts x sum over experts of (share of choices x mean score), as in
    MiniMind's code. MiniMind2 computes it per sequence (`seq_aux`) and takes the mean over the B sequences, MiniMind-3
    computes it over the whole batch, with `num_sequences` 1.
    """
    total = torch.zeros((), device=router_logits[0].device)
    for logits in router_logits:
        num_experts = logits.shape[-1]
        # B sequences, T tokens, E experts
        scores = logits.float().softmax(dim=-1).view(num_sequences, -1, num_experts)
        experts = scores.topk(top_k, dim=-1).indices
        choices = torch.zeros_like(scores).scatter_(-1, experts, 1.0 / top_k)
        per_sequence = (choices.mean(dim=1) * scores.mean(dim=1)).sum(dim=-1)
        total = total + num_experts * per_sequence.mean()
    return total


class BalancedForCausalLM(SettableExperts):
    """The forward pass of both mixtures: in training `loss` includes `router_aux_loss_coef * aux_loss`."""

    config: Any
    model: nn.Module
    lm_head: nn.Module
    training: bool
    loss_function: Callable[..., torch.Tensor]

    def balance(self, router_logits: tuple[torch.Tensor, ...], num_sequences: int) -> torch.Tensor:
        raise NotImplementedError

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Arguments and outputs are those of transformers' Qwen3MoeForCausalLM; the cache is in `kwargs`."""
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits,
            **kwargs,
        )
        remaining = dict(outputs)  # with the cache, whose name transformers 5.24 changed
        hidden_states = remaining.pop("last_hidden_state")
        # As in transformers: a number means the last positions, 0 all of them.
        if isinstance(logits_to_keep, int):
            hidden = hidden_states[:, -logits_to_keep:, :]
        else:
            hidden = hidden_states[:, logits_to_keep, :]
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        aux_loss = None
        if output_router_logits and self.training:
            aux_loss = self.balance(
                remaining["router_logits"], num_sequences=hidden_states.shape[0]
            )
            if loss is not None:
                loss = loss + self.config.router_aux_loss_coef * aux_loss.to(loss.device)
        return MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux_loss, logits=logits, **remaining)


@strict
class MiniMind3MoEConfig(Qwen3MoeConfig):
    """MiniMind-3's mixture (github.com/jingyaogong/minimind at d65ef2c); the defaults are its 198M model."""

    model_type = "minimind3_moe"
    default_theta = 1e6

    vocab_size: int = 6400
    hidden_size: int = 768
    intermediate_size: int = 2432
    moe_intermediate_size: int = 2432
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int | None = None  # hidden / heads, as in MiniMind
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    num_experts: int = 4
    num_experts_per_tok: int = 1
    norm_topk_prob: bool = True
    output_router_logits: bool = True
    router_aux_loss_coef: float = 5e-4
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs: Any) -> None:
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


class MiniMind3MoEForCausalLM(BalancedForCausalLM, Qwen3MoeForCausalLM):
    config: MiniMind3MoEConfig

    def balance(self, router_logits: tuple[torch.Tensor, ...], num_sequences: int) -> torch.Tensor:
        """Balance loss over the batch; each of a token's choices counts fully."""
        top_k = self.config.num_experts_per_tok
        return top_k * balance_loss(router_logits, top_k, num_sequences=1)


class MiniMind2MoEConfig(MiniMind2Config):
    """MiniMind2's mixture (github.com/jingyaogong/minimind at c090b69); the defaults are its 145M model."""

    model_type = "minimind2_moe"
    base_model_tp_plan = {}  # Llama's plan has a dense feed-forward part
    attribute_map = {"num_local_experts": "num_experts"}

    hidden_size: int = 640
    intermediate_size: int = 1728  # of one expert, routed or shared
    num_hidden_layers: int = 8
    num_experts: int = 4
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    output_router_logits: bool = True
    router_aux_loss_coef: float = 0.01

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for name in ("attention_bias", "mlp_bias"):
            if getattr(self, name):
                raise ValueError(f"{name}: not supported by minimind2_moe. Remove it.")

    @property
    def moe_intermediate_size(self) -> int:
        """Width of one expert, under the name used by transformers' expert layers."""
        return self.intermediate_size

    @property
    def norm_topk_prob(self) -> bool:
        """Whether a token's expert scores are normalized to 1: not with a single expert."""
        return self.num_experts_per_tok > 1


class MiniMind2MoEBlock(Qwen3MoeSparseMoeBlock):
    """Routed experts as in Qwen3-MoE (softmax, top-k, renormalised), plus shared experts for every token."""

    def __init__(self, config: MiniMind2MoEConfig) -> None:
        super().__init__(config)  # type: ignore[arg-type]  # it has the required names
        self.shared_experts = nn.ModuleList(
            LlamaMLP(config) for _ in range(config.n_shared_experts)
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        routed = super().forward(hidden_states)
        return sum((shared(hidden_states) for shared in self.shared_experts), routed)


class MiniMind2MoELayer(LlamaDecoderLayer):
    def __init__(self, config: MiniMind2MoEConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.mlp = MiniMind2MoEBlock(config)  # type: ignore[assignment]


class MiniMind2MoEPreTrainedModel(SettableExperts, Qwen3MoePreTrainedModel):
    """Attributes for transformers to record and split the layers; experts are initialized as in Qwen3-MoE."""

    config: MiniMind2MoEConfig  # type: ignore[assignment]
    _no_split_modules = ["MiniMind2MoELayer"]
    _can_record_outputs = {
        "router_logits": OutputRecorder(Qwen3MoeTopKRouter, index=0),
        "hidden_states": MiniMind2MoELayer,
        "attentions": LlamaAttention,
    }


class MiniMind2MoEModel(MiniMind2MoEPreTrainedModel, LlamaModel):  # type: ignore[misc]
    def __init__(self, config: MiniMind2MoEConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(
            MiniMind2MoELayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.post_init()


class MiniMind2MoEForCausalLM(BalancedForCausalLM, MiniMind2MoEPreTrainedModel, LlamaForCausalLM):
    _tp_plan: dict[str, str] = {}  # see base_model_tp_plan

    def __init__(self, config: MiniMind2MoEConfig) -> None:
        # LlamaForCausalLM's own __init__ would build Llama's layers.
        super(LlamaForCausalLM, self).__init__(config)
        self.model = MiniMind2MoEModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def balance(self, router_logits: tuple[torch.Tensor, ...], num_sequences: int) -> torch.Tensor:
        return balance_loss(router_logits, self.config.num_experts_per_tok, num_sequences)
