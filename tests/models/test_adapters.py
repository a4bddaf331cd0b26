import pytest
import torch
from tiny_models import make_tokenizer, tiny_config

from cpt.errors import RecipeError
from cpt.models.adapters import check_lora, count_lora_parameters, merge_lora
from cpt.models.build import build_model
from cpt.models.config import config_from
from cpt.models.inventory import build_on_meta
from cpt.recipe.schema import Model

IDS = torch.arange(3, 63).view(2, 30)


def build(family="llama", *, tied=False, **section):
    config = {**tiny_config(family), "tie_word_embeddings": tied}
    return build_model(Model(from_scratch=True, config=config, **section), make_tokenizer(), seed=3)


def trained(model):
    """The model after two steps that move all that is trained."""
    optimizer = torch.optim.AdamW([p for p in model.train().parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def test_an_empty_section_takes_our_defaults():
    model = build(lora={})
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 32, 0.0)
    adapted = {name.split(".")[-4] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


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


def test_the_preset_adapts_all_layers_and_trains_embeddings_and_head_in_fp32():
    model = build(lora="cpt", dtype="bfloat16")
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_rslora) == (128, 32, True)
    adapted = {
        name.split(".")[-4]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and "lora_" in name
    }
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    whole = [
        name.split(".")[-4]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and "lora_" not in name
    ]
    assert whole == ["embed_tokens", "lm_head"] and {p.dtype for p in model.parameters() if p.requires_grad} == {
        torch.float32
    }


@pytest.mark.parametrize(("tied", "dtype"), [(False, "bfloat16"), (True, "float32")])
def test_the_preset_learns_and_merges_into_what_it_was(tied, dtype):
    model = trained(build(tied=tied, lora="cpt", dtype=dtype))
    logits = model(IDS).logits.float()
    merged = merge_lora(model)
    assert torch.allclose(merged(IDS).logits.float(), logits, atol=1e-5 if dtype == "float32" else 0.05)
    assert torch.equal(merged.get_input_embeddings().weight, merged.get_output_embeddings().weight) == tied
    assert not torch.equal(merged.get_input_embeddings().weight, build(tied=tied).get_input_embeddings().weight)


def test_a_tied_head_that_peft_cannot_follow_is_refused():
    with pytest.raises(RecipeError, match="the head of gpt2 is its embedding `wte`.*lora: {r: 128"):
        build("gpt2", tied=True, lora="cpt")
    assert len(build("gpt2", lora="cpt").peft_config["default"].modules_to_save) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_prj"]},
        {"target_modules": ".*attention"},
        {"modules_to_save": ["wte"]},
    ],
)
def test_names_that_the_model_does_not_have_are_refused_before_its_weights_are_read(options):
    (key,) = options
    with pytest.raises(RecipeError, match=f"`model.lora.{key}`"):
        check_lora(build_on_meta(config_from(tiny_config("llama"))), options)


@pytest.mark.parametrize(("family", "options"), [("llama", {"preset": "cpt", "r": 8}), ("gpt2", {})])
def test_the_count_is_what_peft_trains(family, options):
    model = build(family, lora=options)
    assert count_lora_parameters(build(family), options) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
