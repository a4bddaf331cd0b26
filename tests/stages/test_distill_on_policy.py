import json

import pytest
import torch
from tiny import TINY_LLAMA, write_recipe
from tiny_teachers import save_teacher, student_trainer, texts_of

from cpt.recipe.load import load_recipe


@pytest.fixture(scope="module")
def teacher_folder(corpus, tokenizer_folder, tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("teacher") / "t", tokenizer_folder, texts_of(corpus))


@pytest.fixture
def recipe_of(tiny_recipe, tmp_path, teacher_folder):
    """Prompts of a few words, continued by the student."""
    prompts = tmp_path / "prompts.jsonl"
    lines = (
        json.dumps({"prompt": word})
        for word in ["the", "model reads", "a document", "which word", "after", "and learns"] * 8
    )
    prompts.write_text("\n".join(lines) + "\n")

    def load(*overrides, steps=4, **training):
        settings = {"per_device_train_batch_size": 16, "logging_steps": 1, "max_completion_length": 12, "beta": 0.5}
        settings |= {"teacher_model_name_or_path": str(teacher_folder), "gradient_accumulation_steps": 2} | training
        data = {"sequence_length": 32, "sources": [{"path": str(prompts)}]}
        sections = {**tiny_recipe, "stage": "distill_on_policy", "data": data, "training": settings}
        sections |= {"model": {"from_scratch": True, "config": TINY_LLAMA}, "optimizer": {"learning_rate": 1e-2}}
        sections["budget"] = {"epochs": 32 * steps / 48}
        return load_recipe(write_recipe(sections, tmp_path / "r.yaml"), overrides)

    return load


def test_each_step_reads_its_own_prompts(recipe_of):
    trainer = student_trainer(recipe_of(steps=3))
    items = list(trainer.get_train_dataloader())
    assert [len(item) for item in items] == [32] * (2 * trainer.length.steps)
    assert items[0] == items[1] == [trainer.rows[row] for row in range(32)] and items[2] == [
        trainer.rows[row] for row in range(32, 64)
    ]


@pytest.mark.slow
def test_an_evaluation_takes_none_of_the_runs_random_numbers(recipe_of, tmp_path):
    (tmp_path / "own.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{word} of"}) + "\n" for word in ("reads", "learns", "text"))
    )
    held_out = f"evaluation.perplexity=[{{path: {tmp_path}/own.jsonl, name: own}}]"
    trainer = student_trainer(recipe_of(held_out))
    state = torch.get_rng_state()
    first, second = trainer.evaluate(), trainer.evaluate()
    assert torch.equal(state, torch.get_rng_state()) and first == second and first["eval_own_loss"] > 0
