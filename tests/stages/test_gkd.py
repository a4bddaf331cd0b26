"""GKD: the student continues from what precedes the assistant's first word."""

import pytest
from tiny import write_recipe
from tiny_tasks import TINY

from cpt.errors import RecipeError
from cpt.recipe.load import load_recipe
from cpt.stages.build import build_trainer
from cpt.stages.models import language_model
from cpt.tokenizer.load import load_tokenizer
from cpt.training.arguments import data_of, training_arguments


def build(folder, **data):
    """The tiny recipe, with a teacher of random weights."""
    teacher = folder / "teacher"
    if not teacher.exists():
        recipe = load_recipe(TINY / "sft.yaml", ["seed=7"])
        tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
        language_model(
            recipe, tokenizer, training_arguments(recipe, folder / "t", data_of(recipe, tokenizer))
        ).save_pretrained(teacher)
    training = {"teacher_model_name_or_path": str(teacher), "logging_steps": 1, "lmbda": 0.0}
    sections = {
        "base": str(TINY / "gkd.yaml"),
        "output_dir": str(folder),
        "budget": {"epochs": 3},
        "training": training,
        "data": data,
    }
    recipe = load_recipe(write_recipe(sections, folder / "gkd.yaml"))
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    prepared = data_of(recipe, tokenizer)
    arguments = training_arguments(recipe, folder / "run", prepared)
    return build_trainer(
        recipe, language_model(recipe, tokenizer, arguments), tokenizer, prepared, arguments
    ), tokenizer


def test_prompts_end_where_the_answer_begins_and_padding_is_seen_by_nobody(tmp_path):
    trainer, tokenizer = build(tmp_path)
    rows = [trainer.rows[number] for number in range(3)]
    batch = trainer.collate_examples()(rows)
    for line, row in enumerate(rows):
        first = int((row["labels"] != -100).long().argmax())
        prompt = batch["prompts"][line][batch["prompt_attention_mask"][line] == 1]
        assert prompt.tolist() == row["input_ids"][:first].tolist() and tokenizer.decode(prompt).endswith(
            "assistant\n"
        )
        whole = batch["input_ids"][line][batch["attention_mask"][line] == 1]
        assert tokenizer.pad_token_id not in whole and tokenizer.decode(whole).rstrip().endswith("<|im_end|>")


def test_rows_of_several_conversations_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="`data.packing`: stage `gkd`"):
        build(tmp_path, packing="best_fit")
