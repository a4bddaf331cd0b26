import pytest
from tiny_models import tiny_config

from cpt.errors import RecipeError
from cpt.models.adapter_targets import adaptable, default_targets
from cpt.models.config import config_from
from cpt.models.inventory import build_on_meta


def shape(family):
    return build_on_meta(config_from(tiny_config(family)))


def test_each_method_has_the_layers_it_is_made_for():
    llama = shape("llama")
    assert default_targets(llama, "ln_tuning")["target_modules"] == [
        "input_layernorm",
        "norm",
        "post_attention_layernorm",
    ]
    assert default_targets(llama, "ia3") == {
        "target_modules": ["k_proj", "v_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    }
    assert default_targets(llama, "lokr") == {"target_modules": "all-linear"}


def test_families_that_peft_does_not_know_get_all_linear_layers_scaled():
    assert default_targets(shape("minimind2"), "ia3") == {"target_modules": "all-linear", "feedforward_modules": []}


def test_biases_are_trained_where_there_are_some():
    assert default_targets(shape("qwen2"), "beft")["target_modules"] == ["k_proj", "q_proj", "v_proj"]
    with pytest.raises(RecipeError, match="the linear layers of llama have none"):
        default_targets(shape("llama"), "beft")


def test_the_head_is_not_adapted():
    names = [name for name, _ in adaptable(shape("llama"))]
    assert len(names) == 14 and "lm_head" not in names
