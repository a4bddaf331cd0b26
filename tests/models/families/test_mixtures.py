"""MiniMind's balance loss against its formula, and options that our families refuse."""

import pytest
import torch
from tiny_models import tiny_config
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from cpt.errors import RecipeError
from cpt.models.config import config_from
from cpt.models.families import FAMILIES

IDS = torch.arange(3, 63).view(2, 30)


def build(model_type, **options):
    model = AutoModelForCausalLM.from_config(config_from(tiny_config(model_type) | options))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():  # otherwise the router's scores hardly differ
        for parameter in model.parameters():
            parameter.copy_((parameter.ndim == 1) + torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


@pytest.mark.parametrize("model_type", ["minimind2_moe", "minimind3_moe"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_balance_loss_is_that_of_the_original(model_type, top_k):
    """Per layer: experts x sum of (share of the choices x mean score); in each sequence (MiniMind2) or over the
    batch."""
    model = build(model_type, num_experts_per_tok=top_k, router_aux_loss_coef=0.7).train()
    output, balance = model(IDS, labels=IDS), 0.0
    for logits in output.router_logits:
        scores = logits.softmax(-1).view(*IDS.shape, -1)  # B, T, E
        chosen = F.one_hot(scores.topk(top_k, -1).indices, scores.shape[-1]).float().sum(2)
        if model_type == "minimind2_moe":
            balance += scores.shape[-1] * (chosen.mean(1) / top_k * scores.mean(1)).sum(-1).mean()
        else:
            balance += scores.shape[-1] * (chosen.mean((0, 1)) * scores.mean((0, 1))).sum()
    cross_entropy = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    torch.testing.assert_close(output.loss, cross_entropy + 0.7 * balance, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("cpt-gpt2", "add_cross_attention", True),
        ("cpt-gpt2", "unpadded_vocab_size", 129),
        ("minimind2_moe", "attention_bias", True),
        ("minimind3_moe", "n_shared_experts", 1),
    ],
)
def test_an_option_that_is_not_computed_is_refused(model_type, key, value):
    with pytest.raises(RecipeError, match=key):
        config_from(tiny_config(model_type) | {key: value})


@pytest.mark.parametrize("model_type", ["minimind2_moe", "minimind3_moe"])
def test_grouped_matrix_products_compute_what_the_loop_over_experts_does(model_type):
    model, losses = build(model_type), []
    for name in ("grouped_mm", "eager"):
        model.set_experts_implementation(name)
        losses.append(model(IDS, labels=IDS).loss)
    torch.testing.assert_close(losses[0], losses[1])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_tensor_parallel_plan_names_parts_of_the_model(model_type):
    model = build(model_type, **({"mlp_only_layers": [0]} if model_type == "minimind3_moe" else {}))
    names = {
        ".".join("*" if part.isdigit() else part for part in name.split("."))
        for name, _ in [*model.named_modules(), *model.named_parameters()]
    }
    assert set(model.tp_plan) <= names
