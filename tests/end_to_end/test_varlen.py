"""A run that keeps documents apart by their bounds learns what it would learn with masks."""

import threading

import pytest
import torch
from tiny import write_recipe

from cpt.data.rows.build import build_data
from cpt.models import attention
from cpt.models.attention import BOUNDS, LONGEST
from cpt.models.build import build_model
from cpt.recipe.load import load_recipe
from cpt.stages.build import build_trainer
from cpt.tokenizer.load import load_tokenizer


def trainer_of(sections, folder, attention):
    sections = {**sections, "name": attention, "model": {**sections["model"], "attention": attention}}
    recipe = load_recipe(write_recipe(sections, folder / f"{attention}.yaml"))
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=recipe.seed, evaluation=recipe.evaluation)
    return build_trainer(recipe, build_model(recipe.model, tokenizer, seed=recipe.seed, packed=True), tokenizer, data)


def figures(trainer):
    """Losses of each step, and of the evaluations."""
    trainer.train()
    return [value for line in trainer.state.log_history for name, value in line.items() if name.endswith("loss")]


@pytest.mark.slow
def test_losses_and_evaluations_are_those_of_masks(tiny_recipe, corpus, tmp_path, monkeypatch):
    tiny_recipe["training"] |= {"gradient_checkpointing": True, "dataloader_num_workers": 1}
    tiny_recipe["evaluation"] = {"every_tokens": 1024, "perplexity": [{"path": str(corpus / "held_out.jsonl")}]}
    expected = figures(trainer_of(tiny_recipe, tmp_path, "sdpa"))
    calls, in_training = [], []
    attend, bounds_of = attention.attend_each, attention.document_bounds

    def watched(positions):
        if threading.current_thread() is threading.main_thread():
            in_training.append(torch.is_grad_enabled())
        return bounds_of(positions)

    monkeypatch.setattr(attention, "attend_each", lambda *given: calls.append(1) or attend(*given))
    monkeypatch.setattr(attention, "document_bounds", watched)
    assert figures(trainer_of(tiny_recipe, tmp_path, "varlen")) == pytest.approx(expected, rel=1e-5)
    assert len(expected) > 8 and len(calls) >= 8 * 2 * 2, "steps, micro-batches, layers"
    assert in_training and not any(in_training), "the loader finds the bounds of training, the model the others"


def test_other_runs_get_the_batches_that_they_had(tiny_recipe, tmp_path):
    plain, packed = (
        next(iter(trainer_of(tiny_recipe, tmp_path, name).get_train_dataloader())).keys()
        for name in ("sdpa", "varlen")
    )
    assert plain == {"input_ids", "labels", "position_ids"} and packed - plain == {BOUNDS, LONGEST}
