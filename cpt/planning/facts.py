"""What the planner must know of a model: how many parameters it has, and where."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cpt.models.adapters import adaptable, count_lora_parameters
from cpt.models.fused_loss import why_not_fused
from cpt.models.inventory import attention_heads, build_on_meta, count_model_parameters, flops_per_token


@dataclass(frozen=True)
class ModelFacts:
    """Sizes in numbers, not bytes."""

    name: str
    """The model type."""
    parameters: int
    active: int
    trained: int
    head: int
    """Of the layer that computes the logits, tied or not."""
    vocabulary: int
    """Rows of that layer."""
    hidden: int
    largest_matrix: int
    largest_layer: int
    embedding: int
    is_tied: bool
    """The head is the embedding."""
    flops_per_token: float
    has_fused_loss: bool
    in_linear_layers: int = 0
    """Without the head: what can be in 4 bit."""
    largest_in_layers: int = 0
    """Of one matrix, without embedding and head."""
    cached: int = 0
    """Of keys and values, for each token of a completion's context."""


def facts_of(config: PreTrainedConfig, lora: Mapping[str, Any] | None, sequence_length: int) -> ModelFacts:
    model = build_on_meta(config)
    head = model.get_output_embeddings().get_parameter("weight")
    embedding = model.get_input_embeddings().get_parameter("weight")
    count = count_model_parameters(model)
    by_layer: dict[str, int] = defaultdict(int)
    layers = [f"{name}." for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]
    for name, parameter in model.named_parameters():
        by_layer[next((layer for layer in layers if name.startswith(layer)), name)] += parameter.numel()
    in_layers = [one.numel() for one in model.parameters() if one is not head and one is not embedding]
    return ModelFacts(
        name=str(config.model_type),
        parameters=count.total,
        active=count.active,
        trained=count.total if lora is None else count_lora_parameters(model, lora),
        head=head.numel(),
        vocabulary=head.shape[0],
        hidden=head.shape[1],
        largest_matrix=max(parameter.numel() for parameter in model.parameters()),
        largest_layer=max(by_layer.values()),
        embedding=embedding.numel(),
        is_tied=embedding is head,
        flops_per_token=flops_per_token(model, sequence_length, trains_weights=lora is None),
        has_fused_loss=why_not_fused(model) is None,
        in_linear_layers=sum(layer.get_parameter("weight").numel() for _, layer in adaptable(model)),
        largest_in_layers=max(in_layers, default=0),
        cached=cached_numbers(model),
    )


def cached_numbers(model: PreTrainedModel) -> int:
    """Keys and values of all layers for one token, as transformers caches them: latent attention in full."""
    if (heads := attention_heads(model.config)) == 0:
        return 0
    config = model.config.get_text_config()
    values = config.to_dict()
    layers = sum(type(module).__name__.endswith("Attention") for module in model.modules())
    if values.get("kv_lora_rank"):
        return layers * heads * int(values["qk_nope_head_dim"] + values["qk_rope_head_dim"] + values["v_head_dim"])
    width = int(values.get("head_dim") or int(config.hidden_size) // heads)
    return layers * 2 * int(values.get("num_key_value_heads") or heads) * width
