"""The LSTM of docs/howto/extending.md: an architecture that nothing in cpt was made for."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.errors import RecipeError
from cpt.models.adapters import adaptable, add_lora
from cpt.models.build import build_model
from cpt.models.config import config_from
from cpt.models.fused_loss import FusedLoss, why_not_fused
from cpt.models.inventory import flops_per_token, isolates_documents
from cpt.plugins import import_user_module
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Model
from cpt.train import train

MODULE = "examples.lstm.lstm_language_model"
CONFIG = {"model_type": "lstm_lm", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}


@pytest.fixture
def model():
    import_user_module(MODULE)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_from(CONFIG)).eval()


def packed_row(lengths=(5, 1, 9, 3)):
    ids = torch.randint(3, 96, (2, sum(lengths)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    return ids, positions, list(lengths)


def test_a_packed_row_has_the_logits_of_its_documents_alone(model):
    ids, positions, lengths = packed_row()
    together = model(ids, position_ids=positions).logits
    alone = torch.cat([model(part).logits for part in ids.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(together, alone)
    assert not torch.allclose(together, model(ids).logits, atol=1e-3), "without positions they are one document"


def test_packed_loss_and_gradients_are_those_of_the_documents_alone(model):
    ids, positions, lengths = packed_row()
    labels = ids.clone()
    labels[positions == 0] = -100  # the first token of a document is never predicted
    parts = [
        (part, of_part)
        for part, of_part in zip(ids.split(lengths, 1), labels.split(lengths, 1), strict=True)
        if part.shape[1] > 1
    ]
    count = int((labels[:, 1:] != -100).sum())
    losses, gradients = [], []
    for batches in ([(ids, labels, positions)], [(part, of_part, None) for part, of_part in parts]):
        model.zero_grad()
        loss = sum(model(a, labels=b, position_ids=c, num_items_in_batch=count).loss for a, b, c in batches)
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)


def test_padding_on_the_left_changes_no_answer(model):
    ids = torch.tensor([[5, 6, 7, 8]])
    padded = torch.tensor([[0, 0, 0, 5, 6, 7, 8]])
    mask = (padded > 0).long()
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 3:], model(ids).logits)
    alone = model.generate(ids, max_new_tokens=6, do_sample=False)
    beside = model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert alone[0, 4:].tolist() == beside[0, 7:].tolist()


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_from_the_state_is_that_from_the_whole_text(model, beams):
    ids = torch.tensor([[5, 6, 7], [9, 8, 7]])
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams, "eos_token_id": None}
    with_state = model.generate(ids, use_cache=True, **options)
    assert with_state.tolist() == model.generate(ids, use_cache=False, **options).tolist()


def test_gradient_checkpointing_changes_no_gradient(model):
    ids, positions, _ = packed_row()
    gradients = []
    for switch in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        switch()
        model.train().zero_grad()
        model(ids, position_ids=positions, labels=ids).loss.backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*gradients)


def test_the_fused_loss_is_the_plain_one(model):
    ids, positions, _ = packed_row()
    plain = model.train()(ids, position_ids=positions, labels=ids).loss
    assert why_not_fused(model) is None
    FusedLoss(model, tokens=8)
    torch.testing.assert_close(model(ids, position_ids=positions, labels=ids).loss, plain)


def test_lora_reaches_the_projections_and_not_the_lstm(model):
    assert [name for name, _ in adaptable(model)] == ["model.layers.0.out_proj", "model.layers.1.out_proj"]
    adapted = add_lora(model, {"r": 4})
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trained and all("out_proj.lora_" in name for name in trained)
    with pytest.raises((RecipeError, ValueError), match=r"lstm|LSTM"):
        add_lora(AutoModelForCausalLM.from_config(model.config), {"target_modules": ["lstm"]})


def test_its_work_is_counted_without_attention(model):
    matrices = sum(
        parameter.numel() for parameter in model.parameters() if parameter.ndim > 1
    )  # the tied embedding is the head
    assert flops_per_token(model, 10_000) == 6 * matrices


def test_it_is_packed_because_it_says_so_and_a_class_that_says_so_wrongly_is_refused(model, monkeypatch):
    assert isolates_documents(model.config)
    monkeypatch.setattr(type(model).__mro__[1], "keeps_documents_apart", False)
    assert not isolates_documents(model.config)
    monkeypatch.setattr(type(model).__mro__[1], "keeps_documents_apart", True)
    section = Model.model_validate({"import": MODULE, "config": CONFIG, "from_scratch": True})
    build_model(section, make_tokenizer(), packed=True)
    monkeypatch.setattr(
        import_user_module(MODULE), "find_documents", lambda *_: None
    )  # reads each row as one document
    with pytest.raises(RecipeError, match="the second document of a row sees the first"):
        build_model(section, make_tokenizer(), packed=True)


def test_a_few_steps_teach_it(tmp_path):
    changes = [
        "budget.tokens=8_192",
        "data.sequence_length=64",
        "budget.global_batch_tokens=512",
        "training.logging_steps=4",
    ]
    folder = train(
        load_recipe(
            "examples/lstm/pretrain.yaml", [f"output_dir={tmp_path}", "evaluation.held_out_share=null", *changes]
        )
    )
    lines = [json.loads(line) for line in (tmp_path / "lstm/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]
    assert AutoConfig.from_pretrained(folder).model_type == "lstm_lm"
    assert (folder / "lstm_language_model.py").exists()


@pytest.mark.slow
def test_a_resumed_run_has_the_weights_of_one_that_was_not_interrupted(tmp_path):
    changes = [
        "budget.tokens=5_120",
        "data.sequence_length=64",
        "budget.global_batch_tokens=512",
        "checkpoints.every_steps=5",
    ]
    recipe = load_recipe(
        "examples/lstm/pretrain.yaml", [f"output_dir={tmp_path}", "evaluation.held_out_share=null", *changes]
    )
    straight = load_file(train(recipe) / "model.safetensors")
    resumed = load_file(train(recipe, resume=tmp_path / "lstm/checkpoint-5") / "model.safetensors")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
