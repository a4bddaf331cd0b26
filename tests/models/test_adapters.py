import pytest
import torch
from tiny_models import make_tokenizer, tiny_config

from cpt.errors import RecipeError
from cpt.models.adapters import check_lora_options
from cpt.models.build import build_model
from cpt.recipe.schema import Model

IDS = torch.arange(3, 63).view(2, 30)


def build(**section):
    return build_model(Model(from_scratch=True, config=tiny_config("llama"), **section), make_tokenizer(), seed=3)


def test_a_misspelt_option_gets_a_suggestion():
    with pytest.raises(RecipeError, match="`model.lora.lora_alhpa` is not an option.*Did you mean `lora_alpha`"):
        check_lora_options({"r": 8, "lora_alhpa": 16})


def test_an_empty_section_takes_our_defaults():
    model = build(lora={})
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 32, 0.0)
    adapted = {name.split(".")[-4] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_target_modules_that_match_nothing_are_a_recipe_error():
    with pytest.raises(RecipeError, match="model.lora: .*no_such_layer"):
        build(lora={"target_modules": ["no_such_layer"]})


def test_adapters_are_fp32_on_a_bfloat16_model():
    dtypes = {name.split(".")[-2]: p.dtype for name, p in build(lora={}, dtype="bfloat16").named_parameters() if p.requires_grad}
    assert set(dtypes.values()) == {torch.float32}


def test_adapters_start_from_the_seed_and_change_nothing():
    plain, first, second = build().eval(), build(lora={}).eval(), build(lora={}).eval()
    assert torch.equal(first(IDS).logits, plain(IDS).logits)
    assert all(torch.equal(p, second.get_parameter(name)) for name, p in first.named_parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_adapters_learn_under_gradient_checkpointing(reentrant: bool):
    model = build(lora={}).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    gradients = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)
