"""Parts of a model that are trained by name, and what is said where a name is wrong."""

import pytest
import torch
from tiny_models import gradients, tiny_config, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from cpt.errors import RecipeError
from cpt.models.config import config_from
from cpt.models.freezing import freeze_others
from cpt.models.inventory import attention_flops, build_on_meta, flops_per_token

IDS = torch.arange(3, 35)[None]


def trained(*patterns, **config):
    model = build_on_meta(config_from(tiny_config("llama", **config)))
    freeze_others(model, patterns)
    return {
        name.removesuffix(".weight") for name, one in model.named_parameters() if one.requires_grad
    }


def test_a_pattern_is_a_part_of_a_parameters_name():
    assert trained("lm_head", "model.norm") == {"lm_head", "model.norm"}
    assert trained("norm") == {"model.norm"}
    layer = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert trained("layers.1.self_attn") == {f"model.layers.1.self_attn.{name}" for name in layer}
    assert trained("layers.0-1.mlp.up_proj") == {
        f"model.layers.{number}.mlp.up_proj" for number in (0, 1)
    }
    assert len(trained("*norm")) == 5
    twelve = {"num_hidden_layers": 12}
    assert len(trained("layers.1", **twelve)) == 9 and len(trained("layers.9-11", **twelve)) == 27


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("layer.1", "`layers`"),
        ("lm_haed", "`lm_head`"),
        ("new_row", "`new_rows`"),
        ("layers.1-4", "last layer is `model.layers.1`"),
        ("layers.1-0", "last layer is `model.layers.1`"),
        ("layers.2", "last layer is `model.layers.1`"),
    ],
)
def test_a_name_that_is_not_in_the_model_is_refused_with_what_is(pattern, hint):
    with pytest.raises(RecipeError, match="`model.train_only`") as refused:
        trained(pattern)
    assert f"`{pattern}`" in str(refused.value) and hint in str(refused.value)


def test_a_tied_head_is_trained_with_the_embedding_which_is_reported():
    model = build_on_meta(config_from(tiny_config("llama", tie_word_embeddings=True)))
    (note,) = freeze_others(model, ["lm_head"])
    assert "`lm_head.weight` is tied to `model.embed_tokens.weight`" in note
    assert [name for name, one in model.named_parameters() if one.requires_grad] == [
        "model.embed_tokens.weight"
    ]
    assert freeze_others(model, ["lm_head", "embed_tokens"]) == []


@pytest.mark.parametrize(
    ("patterns", "layers"),
    [(["layers.1", "lm_head"], 1), (["layers.0.mlp"], 1), (["lm_head"], 0), (["embed_tokens"], 2)],
)
def test_only_these_get_gradients_and_the_operations_are_counted(patterns, layers):
    """`layers`: with attention in the backward pass, of two."""
    config = tiny_config("llama", tie_word_embeddings=False)
    model = tiny_model(config, train_only=patterns, attention="eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert gradients(model).keys() == {
        name for name, one in model.named_parameters() if one.requires_grad
    }
    tokens = IDS.numel()
    to_come = (1 + layers) * attention_flops(
        model.config, tokens
    )  # torch counts scores of later tokens too
    assert flops_per_token(model, tokens) == pytest.approx(
        counter.get_total_flops() / tokens - to_come, rel=0.1
    )
