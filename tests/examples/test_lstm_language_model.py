"""The LSTM of docs/howto/extending.md: an architecture that nothing in cpt was made for."""

import json

import pytest
import torch
from tiny_models import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.errors import RecipeError
from cpt.models.build import build_model
from cpt.models.config import config_from
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


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_packed_loss_and_gradients_are_those_of_the_documents_alone(model):
    ids, positions, lengths = packed_row()
    labels = ids.masked_fill(
        positions == 0, -100
    )  # the first token of a document is never predicted
    count = int((labels[:, 1:] != -100).sum())
    packed = model(ids, labels=labels, position_ids=positions, num_items_in_batch=count).loss
    parts = [
        pair
        for pair in zip(ids.split(lengths, 1), labels.split(lengths, 1), strict=True)
        if len(pair[0][0]) > 1
    ]
    alone = sum(
        model(part, labels=of_part, num_items_in_batch=count).loss for part, of_part in parts
    )
    torch.testing.assert_close(packed, alone, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        gradients_of(model, packed), gradients_of(model, alone), atol=1e-6, rtol=1e-4
    )
    together = model(ids, labels=labels, num_items_in_batch=count).loss
    assert abs(together - packed) > 1e-3, "without positions they are one document"


def test_generation_from_the_state_is_that_from_the_whole_text(model):
    ids = torch.tensor([[5, 6, 7], [9, 8, 7]])
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3, "eos_token_id": None}
    with_state = model.generate(ids, use_cache=True, **options)
    assert with_state.tolist() == model.generate(ids, use_cache=False, **options).tolist()


def test_a_class_that_says_wrongly_that_it_keeps_documents_apart_is_refused(monkeypatch):
    section = Model.model_validate({"import": MODULE, "config": CONFIG, "from_scratch": True})
    build_model(section, make_tokenizer(), packed=True)
    monkeypatch.setattr(import_user_module(MODULE), "find_documents", lambda *_: None)
    with pytest.raises(RecipeError, match="the second document of a row depends on the first"):
        build_model(section, make_tokenizer(), packed=True)


@pytest.mark.heavy
def test_a_few_steps_teach_it(tmp_path):
    changes = ["budget.tokens=8_192", "data.sequence_length=64", "budget.global_batch_tokens=512"]
    changes += [
        f"output_dir={tmp_path}",
        "evaluation.held_out_share=null",
        "training.logging_steps=4",
    ]
    folder = train(load_recipe("examples/lstm/pretrain.yaml", changes))
    lines = [
        json.loads(line) for line in (tmp_path / "lstm/metrics.jsonl").read_text().splitlines()
    ]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]
    assert AutoConfig.from_pretrained(folder).model_type == "lstm_lm"
    assert (folder / "lstm_language_model.py").exists()
