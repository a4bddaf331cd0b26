"""SFT is the loop of continued pre-training on other rows, and packing changes nothing of what is learned."""

import json

import pytest
import torch
from tiny import TINY_LLAMA, write_recipe
from tiny_tasks import TINY, answers, preferences

from cpt.recipe.load import load_recipe
from cpt.stages import cpt, sft
from cpt.stages.arguments import training_arguments
from cpt.stages.build import build_trainer
from cpt.stages.data import data_of
from cpt.stages.model import language_model
from cpt.tokenizer.load import load_tokenizer


def test_it_differs_in_its_columns_alone():
    assert sft.build_trainer is cpt.build_trainer and sft.CONFIG is cpt.CONFIG and sft.COLUMNS == ("messages",)


@pytest.fixture
def conversations(tmp_path):
    """Of one turn and of several, short and long."""
    longer = [
        {"messages": row["prompt"] + row["chosen"] + row["prompt"] + row["rejected"]} for row in preferences()[:9]
    ]
    path = tmp_path / "conversations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*answers(), *longer]))
    return path


def step_of_all(conversations, folder, packing, attention):
    """Loss and gradients of one step over all rows, as the trainer makes them, and the rows that it took."""
    sections = {
        "name": packing,
        "stage": "sft",
        "output_dir": str(folder),
        "model": {
            "from_scratch": True,
            "config": {**TINY_LLAMA, "max_position_embeddings": 256},
            "attention": attention,
        },
        "tokenizer": {"path": str(TINY / "tokenizer")},
        "data": {"sequence_length": 192, "packing": packing, "sources": [{"path": str(conversations)}]},
        "budget": {"epochs": 1},
        "training": {"per_device_train_batch_size": 1},
    }
    recipe = load_recipe(write_recipe(sections, folder / f"{packing}.yaml"))
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = data_of(recipe, tokenizer)
    arguments = training_arguments(recipe, folder / packing, data)
    trainer = build_trainer(recipe, language_model(recipe, tokenizer, arguments), tokenizer, data, arguments)
    batches = [data.rows.batch([number]) for number in range(data.num_rows)]
    learned = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    trainer.model.train()
    loss = sum(
        trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(learned)) for batch in batches
    )
    loss.backward()
    return (
        loss.item(),
        {name: parameter.grad for name, parameter in trainer.model.named_parameters()},
        len(batches),
        learned,
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager", "varlen"])
def test_packed_and_unpacked_conversations_have_the_same_loss_and_gradients(conversations, tmp_path, attention):
    packed, gradients, rows, learned = step_of_all(conversations, tmp_path, "best_fit", attention)
    alone, others, more_rows, as_many = step_of_all(
        conversations, tmp_path, "none", "eager" if attention == "eager" else "sdpa"
    )
    assert rows < more_rows == 25 and learned == as_many > 0
    assert packed == pytest.approx(alone, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-4, atol=1e-6)
