"""Which model a stage trains, and which it is compared with."""

import torch
from example_runs import build_run
from tiny_models import make_tokenizer

from cpt.stages.models import is_packed, model_for, reference_model


def test_the_reference_has_the_weights_of_the_start(tmp_path):
    trainer = build_run("dpo", tmp_path)
    again = reference_model(trainer.recipe, make_tokenizer(), trainer.args)
    trained = model_for(trainer.recipe, make_tokenizer(), trainer.args)
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), trained.parameters(), strict=True))
    assert not again.training and not any(parameter.requires_grad for parameter in again.parameters())


def test_an_adapter_needs_no_reference(tmp_path):
    trainer = build_run("dpo", tmp_path, lora={})
    assert reference_model(trainer.recipe, make_tokenizer(), trainer.args) is None


def test_a_stage_may_have_a_model_of_its_own(tmp_path):
    trainer = build_run("reward", tmp_path)
    assert type(trainer.model).__name__ == "LlamaForSequenceClassification"


def test_only_rows_of_texts_are_packed(tmp_path):
    packed = build_run("dpo", tmp_path).recipe
    assert not is_packed(packed) and is_packed(packed.model_copy(update={"stage": "sft"}))
