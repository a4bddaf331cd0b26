"""Options of our families against the formulas of the original models, written out here without their classes."""

import math
from typing import Any

import pytest
import torch
from tiny_models import tiny_config
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from cpt.errors import RecipeError
from cpt.models.config import config_from
from cpt.models.families.register import FAMILIES

IDS = torch.arange(3, 63).view(2, 30)
ACTIVATIONS = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 2048,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
YARN |= {"attention_factor": 1.0}  # MiniMind's `inference_rope_scaling`
ROTATIONS = [{"rope_theta": 500.0}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {"rope_scaling": YARN}]
DECODER = [
    {},
    {"hidden_act": "gelu"},
    {"rms_norm_eps": 0.5},
    {"head_dim": 16},
    {"num_key_value_heads": 1},
    {"tie_word_embeddings": False},
    *ROTATIONS,
]
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
MIXTURE = [{"num_experts": 5, "num_experts_per_tok": k} for k in (1, 2, 3)]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "cpt-gpt2": [
        {},
        {"activation_function": "relu", "n_inner": 40},
        {"scale_attn_by_inverse_layer_idx": True},
        {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 40},
    ],
    "minimind2": [*DECODER, {"attention_bias": True, "mlp_bias": True}],
    "minimind3": [
        *DECODER,
        WINDOW | {"max_window_layers": 1},
        WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    ],
    "minimind2_moe": [
        *DECODER,
        *MIXTURE,
        {"n_shared_experts": 0},
        {"n_shared_experts": 2},
    ],
    "minimind3_moe": [
        *DECODER,
        *MIXTURE,
        *({"norm_topk_prob": False, "num_experts_per_tok": k} for k in (1, 2)),
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0]},
        WINDOW,
    ],
}
REFUSED = [
    ("cpt-gpt2", "add_cross_attention", True),
    ("cpt-gpt2", "unpadded_vocab_size", 129),
    ("minimind2_moe", "attention_bias", True),
    ("minimind3_moe", "n_shared_experts", 1),
]


def rms(x, weight, eps):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def angles(config, width: int) -> torch.Tensor:
    """Of each position and pair of dimensions, [T, width / 2]."""
    rope, pair = config.rope_parameters, torch.arange(width // 2)
    theta = rope["rope_theta"]
    frequency = theta ** (-2 * pair / width)
    if rope["rope_type"] == "linear":
        frequency = frequency / rope["factor"]
    if rope["rope_type"] == "yarn":

        def pair_that_turns(times):  # the pair of dimensions that turns so often within the original context
            return (
                width
                * math.log(rope["original_max_position_embeddings"] / (2 * math.pi * times))
                / (2 * math.log(theta))
            )

        low, high = math.floor(pair_that_turns(rope["beta_fast"])), math.ceil(pair_that_turns(rope["beta_slow"]))
        stretched = ((pair - max(low, 0)) / (high - max(low, 0))).clamp(0, 1)
        frequency = frequency * (1 - stretched + stretched / rope["factor"])
    return torch.arange(IDS.shape[1])[:, None] * frequency


def rotate(x, angle):
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attend(q, k, v, scale, window=None):
    """[B, heads, T, width]; each key and value head serves as many query heads as there are more of these."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Formulas:
    """The tensors of one model by name, and the architecture's formulas over them."""

    def __init__(self, model):
        self.config, self.tensors, self.router_scores = model.config, model.state_dict(), []

    def linear(self, x, name):
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def gated(self, x, name):
        act = ACTIVATIONS[self.config.hidden_act]
        return self.linear(
            act(self.linear(x, f"{name}.gate_proj")) * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj"
        )

    def mixture(self, x, name):
        config, act = self.config, ACTIVATIONS[self.config.hidden_act]
        scores = self.linear(x, f"{name}.gate").softmax(-1)
        self.router_scores.append(scores)
        weights, chosen = scores.topk(config.num_experts_per_tok, -1)
        if config.model_type == "minimind2_moe":
            weights = weights / weights.sum(-1, keepdim=True) if config.num_experts_per_tok > 1 else weights
        elif config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in range(config.num_experts):
            gate, up = F.linear(x, self.tensors[f"{name}.experts.gate_up_proj"][expert]).chunk(2, -1)
            share = (weights * (chosen == expert)).sum(-1, keepdim=True)
            out = out + share * F.linear(act(gate) * up, self.tensors[f"{name}.experts.down_proj"][expert])
        shared = config.n_shared_experts if config.model_type == "minimind2_moe" else 0
        return out + sum(self.gated(x, f"{name}.shared_experts.{index}") for index in range(shared))

    def decoder(self):
        config = self.config
        angle = angles(config, config.head_dim)
        x = self.tensors["model.embed_tokens.weight"][IDS]
        for layer in range(config.num_hidden_layers):
            name = f"model.layers.{layer}"
            h = rms(x, self.tensors[f"{name}.input_layernorm.weight"], config.rms_norm_eps)
            q, k, v = (
                self.linear(h, f"{name}.self_attn.{p}_proj").unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
                for p in "qkv"
            )
            if config.model_type.startswith("minimind3"):
                q, k = (
                    rms(part, self.tensors[f"{name}.self_attn.{p}_norm.weight"], config.rms_norm_eps)
                    for part, p in ((q, "q"), (k, "k"))
                )
            out = attend(rotate(q, angle), rotate(k, angle), v, config.head_dim**-0.5, self.window(layer))
            x = x + self.linear(out, f"{name}.self_attn.o_proj")
            h = rms(x, self.tensors[f"{name}.post_attention_layernorm.weight"], config.rms_norm_eps)
            x = x + (self.mixture if self.is_mixture(layer) else self.gated)(h, f"{name}.mlp")
        return self.linear(rms(x, self.tensors["model.norm.weight"], config.rms_norm_eps), "lm_head")

    def window(self, layer):
        config = self.config
        if not config.model_type.startswith("minimind3") or not config.use_sliding_window:
            return None
        if config.model_type == "minimind3" and config.layer_types[layer] == "full_attention":
            return None
        return config.sliding_window

    def is_mixture(self, layer):
        config = self.config
        if config.model_type == "minimind3_moe":
            return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
        return config.model_type == "minimind2_moe"

    def gpt2(self):
        config, act = self.config, ACTIVATIONS[self.config.activation_function]

        def norm(x, name):
            weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
            centred = x - x.mean(-1, keepdim=True)
            return weight * centred / (centred.pow(2).mean(-1, keepdim=True) + config.layer_norm_epsilon).sqrt() + bias

        def conv(x, name):
            return x @ self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]

        x = self.tensors["transformer.wte.weight"][IDS] + self.tensors["transformer.wpe.weight"][: IDS.shape[1]]
        for layer in range(config.n_layer):
            name = f"transformer.h.{layer}"
            parts = conv(norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn").chunk(3, -1)
            q, k, v = (part.unflatten(-1, (config.n_head, -1)).transpose(1, 2) for part in parts)
            scale = (q.shape[-1] ** -0.5 if config.scale_attn_weights else 1) / (
                layer + 1 if config.scale_attn_by_inverse_layer_idx else 1
            )
            x = x + conv(attend(q, k, v, scale), f"{name}.attn.c_proj")
            x = x + conv(act(conv(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc")), f"{name}.mlp.c_proj")
        return self.linear(norm(x, "transformer.ln_f"), "lm_head")

    def logits(self):
        return self.gpt2() if self.config.model_type == "cpt-gpt2" else self.decoder()

    def balance(self):
        """Per layer: experts x sum of (share of the choices x mean score); in each sequence (MiniMind2) or over the
        batch."""
        experts, top_k, total = self.config.num_experts, self.config.num_experts_per_tok, 0.0
        for scores in self.router_scores:
            chosen = F.one_hot(scores.topk(top_k, -1).indices, experts).float()  # B, T, k, E
            if self.config.model_type == "minimind2_moe":
                total += experts * (chosen.sum(2).mean(1) / top_k * scores.mean(1)).sum(-1).mean()
            else:
                total += experts * (chosen.mean((0, 1)) * scores.mean((0, 1))).sum()
        return total


def build(model_type: str, options: dict[str, Any], attention: str | None = None):
    model = AutoModelForCausalLM.from_config(
        config_from(tiny_config(model_type) | options), attn_implementation=attention
    )
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():  # otherwise biases are 0, norms are 1 and the router's scores hardly differ
        for parameter in model.parameters():
            parameter.copy_((parameter.ndim == 1) + torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


CASES = [
    pytest.param(name, options, id=f"{name}-{options}") for name, several in OPTIONS.items() for options in several
]


@pytest.mark.parametrize(("model_type", "options"), CASES)
def test_an_option_means_what_it_does_in_the_original(model_type: str, options: dict[str, Any]):
    model = build(model_type, options, "eager").eval()
    expected = Formulas(model).logits()
    known = getattr(model.config, "unpadded_vocab_size", None)
    torch.testing.assert_close(model(IDS).logits[..., :known], expected[..., :known], atol=1e-4, rtol=1e-4)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == model.config.tie_word_embeddings


@pytest.mark.parametrize("model_type", ["minimind2_moe", "minimind3_moe"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_balance_loss_is_that_of_the_original(model_type: str, top_k: int):
    model = build(model_type, {"num_experts_per_tok": top_k, "router_aux_loss_coef": 0.7}).train()
    formulas = Formulas(model)
    cross_entropy = F.cross_entropy(formulas.logits()[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    torch.testing.assert_close(
        model(IDS, labels=IDS).loss, cross_entropy + 0.7 * formulas.balance(), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(("model_type", "key", "value"), REFUSED)
def test_an_option_that_is_not_computed_is_refused(model_type: str, key: str, value: object):
    with pytest.raises(RecipeError, match=key):
        config_from(tiny_config(model_type) | {key: value})


@pytest.mark.parametrize("model_type", ["minimind2_moe", "minimind3_moe"])
def test_grouped_matrix_products_compute_what_the_loop_over_experts_does(model_type: str):
    model = build(model_type, {})
    losses = []
    for name in ("grouped_mm", "eager"):
        model.set_experts_implementation(name)
        losses.append(model(IDS, labels=IDS).loss)
    torch.testing.assert_close(losses[0], losses[1])
    assert build(model_type, {}).config._experts_implementation == "grouped_mm", (
        "transformers' default, as for its own mixtures"
    )


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_tensor_parallel_plan_names_parts_of_the_model(model_type: str):
    model = build(model_type, {"mlp_only_layers": [0]} if model_type == "minimind3_moe" else {})
    names = {
        ".".join("*" if part.isdigit() else part for part in name.split("."))
        for name, _ in [*model.named_modules(), *model.named_parameters()]
    }
    assert set(model.tp_plan) <= names
