from types import SimpleNamespace

import pytest
import torch

from cpt.errors import RecipeError
from cpt.optim.adamw import automatic_dtype
from cpt.recipe.schema import Recipe
from cpt.training.arguments import training_arguments, weights_dtype


def recipe(**changes):
    sections = {
        "name": "a-run",
        "model": {"path": "some/model"},
        "data": {"sequence_length": 64, "sources": [{"path": "a.txt"}]},
        "budget": {"tokens": 10_000, "global_batch_tokens": 512},
        "training": {"per_device_train_batch_size": 2},
    }
    return Recipe.model_validate({**sections, **changes})


def arguments(recipe, tmp_path, held_out=("a",)):
    return training_arguments(recipe, tmp_path, SimpleNamespace(form="document", num_rows=100, held_out=held_out))


def test_intervals_in_tokens_become_steps(tmp_path):
    made = arguments(recipe(checkpoints={"every_tokens": 1500, "keep": 2}, evaluation={"every_steps": 7}), tmp_path)
    assert (made.save_steps, made.save_total_limit, made.eval_steps, made.eval_on_start) == (3, None, 7, True)


def test_without_intervals_only_the_end_is_saved_and_evaluated(tmp_path):
    made = arguments(recipe(), tmp_path)
    assert (made.save_steps, made.eval_steps, made.max_steps) == (20, 20, 20)


def test_without_held_out_documents_nothing_is_evaluated(tmp_path):
    assert arguments(recipe(), tmp_path, held_out=()).eval_strategy == "no"


def test_hugging_faces_own_keys_pass_unchanged(tmp_path):
    made = arguments(recipe(training={"max_grad_norm": 0.5, "logging_steps": 3}), tmp_path)
    assert (made.max_grad_norm, made.logging_steps, made.logging_nan_inf_filter) == (0.5, 3, False)


def test_what_hugging_face_refuses_is_a_recipe_error(tmp_path):
    with pytest.raises(RecipeError, match="TrainingArguments says"):
        arguments(recipe(training={"logging_strategy": "sometimes"}), tmp_path)


def test_weights_are_in_bfloat16_only_where_something_keeps_fp32_ones(tmp_path):
    bf16 = recipe(training={"bf16": True})
    assert weights_dtype(bf16, arguments(bf16, tmp_path)) == torch.float32, "on a CPU"
    adapter = recipe(training={"bf16": True}, model={"path": "some/model", "lora": {}})
    assert weights_dtype(adapter, arguments(adapter, tmp_path)) == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, torch.bfloat16),
        ({"training": {}}, torch.float32),
        ({"training": {"bf16": True, "fsdp": True}}, torch.float32),
        ({"optimizer": {"name": "muon"}}, torch.float32),
        ({"optimizer": {"name": "adamw_8bit"}}, torch.float32),
        ({"optimizer": {"name": "torch.optim:Adam"}}, torch.float32),
    ],
)
def test_on_a_gpu_weights_are_bfloat16_where_the_optimizer_keeps_a_master_copy(changes, expected):
    assert automatic_dtype(recipe(**{"training": {"bf16": True}, **changes}), deepspeed=False, on_gpu=True) == expected


def test_evaluation_takes_no_more_rows_at_once_than_training(tmp_path):
    assert arguments(recipe(), tmp_path).per_device_eval_batch_size == 2
    assert arguments(recipe(training={"per_device_eval_batch_size": 5}), tmp_path).per_device_eval_batch_size == 5
