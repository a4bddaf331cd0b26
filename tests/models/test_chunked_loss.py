"""The same loss and gradients as the model's own, with a fraction of the logits alive."""

import pytest
import torch
from planned_setups import SHAPES
from tiny_models import make_tokenizer, tiny_config
from transformers import AutoModelForCausalLM

from cpt.errors import RecipeError
from cpt.models.build import build_model
from cpt.models.chunked_loss import is_left_to_liger, tokens_at_once, use_chunked_loss
from cpt.models.config import config_from
from cpt.planner.storages import PeakOfStorages
from cpt.recipe.schema import Model

FAMILIES = ("llama", "gpt2", "minimind2", "minimind2_moe", "nemotron", "qwen3")


def built(family, **model):
    torch.manual_seed(0)
    return build_model(Model(from_scratch=True, config=tiny_config(family), **model), make_tokenizer()).train()


def row(model):
    ids = torch.randint(4, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(24).expand(2, 24)}


def loss_and_gradients(model, **options):
    torch.manual_seed(3)
    loss = model(**row(model), **options).loss
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return loss, found


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": torch.tensor(100)}], ids=["mean", "of the step"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_the_models_own(family, options):
    model = built(family)
    loss, gradients = loss_and_gradients(model, **options)
    use_chunked_loss(model, tokens=7)
    chunked, of_chunks = loss_and_gradients(model, **options)
    assert chunked.item() == pytest.approx(loss.item(), rel=1e-6)
    assert gradients.keys() == of_chunks.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(of_chunks[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lora", [{"r": 4}, "cpt"])
def test_adapters_on_the_head_take_part(lora):
    model = built("llama", lora=lora if isinstance(lora, str) else {**lora, "target_modules": "all-linear"})
    loss, gradients = loss_and_gradients(model)
    use_chunked_loss(model, tokens=5)
    chunked, of_chunks = loss_and_gradients(model)
    assert chunked.item() == pytest.approx(loss.item(), rel=1e-6) and gradients.keys() == of_chunks.keys()


def test_evaluation_still_has_its_logits():
    model = built("llama")
    model.eval()
    before = model(**row(model))
    use_chunked_loss(model, tokens=5)
    after = model(**row(model))
    assert torch.equal(before.logits, after.logits) and torch.equal(before.loss, after.loss)
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False).shape == (1, 5)


def test_weights_keep_their_names_and_ties():
    model = built("gpt2")
    names = list(model.state_dict())
    use_chunked_loss(model)
    assert list(model.state_dict()) == names and model.lm_head.weight is model.transformer.wte.weight


def test_the_peak_is_lower():
    config = config_from({**SHAPES["llama"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 20_000})

    def peak(chunks):
        model = AutoModelForCausalLM.from_config(config).train()
        if chunks:
            use_chunked_loss(model, tokens=64)
        ids = torch.zeros((1, 512), dtype=torch.long)
        with PeakOfStorages() as storages:
            model(input_ids=ids, labels=ids).loss.backward()
        return storages.peak

    logits, head = 12 * 512 * 20_000, 4 * 64 * 20_000
    assert peak(chunks=False) - peak(chunks=True) > 0.7 * (logits - 2 * head)


def test_a_model_that_changes_its_logits_is_refused():
    model = AutoModelForCausalLM.from_config(config_from({**tiny_config("llama"), "model_type": "granite", "logits_scaling": 8.0}))
    with pytest.raises(RecipeError, match="changes its logits"):
        use_chunked_loss(model)


def test_chunks_have_logits_of_about_a_gibibyte():
    assert [tokens_at_once(size) for size in (32_000, 128_256, 256_000, 10**7)] == [2048, 512, 256, 256]
    assert not is_left_to_liger(config_from(SHAPES["gpt2"]), on_gpu=True) and is_left_to_liger(config_from(SHAPES["llama"]), on_gpu=True)
    assert not is_left_to_liger(config_from(SHAPES["llama"]), on_gpu=False)
