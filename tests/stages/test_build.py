"""The trainer, the models and the teacher of a stage."""

import json
import shutil

import pytest
import torch
from example_runs import build_run
from tiny import TINY_LLAMA
from tiny_checkpoints import save_llama
from tiny_models import make_tokenizer
from tiny_trainers import trainer_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.errors import RecipeError
from cpt.recipe.load import REPOSITORY, load_recipe
from cpt.recipe.schema import Recipe
from cpt.stages.distill import DistillConfig
from cpt.stages.models import build_teacher, model_for, reference_model
from cpt.training.arguments import find_stage, training_arguments
from cpt.training.trainer import CPTTrainer

STAGE = """
from transformers import Trainer, TrainingArguments as CONFIG
from cpt.training.trainer import CPTTrainer

COLUMNS = ("text",)

class Mine(CPTTrainer):
    pass

def build_trainer(recipe, model, tokenizer, data, arguments, length):
"""
MINE = "    return Mine(recipe, model, arguments, rows=data.rows, length=length, tokenizer=tokenizer)\n"
ANOTHER = "    return Trainer(model, arguments, train_dataset=data.rows)\n"


@pytest.fixture
def masks(monkeypatch):
    """Whether batches of the trainers that are built have masks, as they tell the attention."""
    told = []
    monkeypatch.setattr(
        "cpt.training.trainer.leave_out_cudnn", lambda *, has_masks: told.append(has_masks)
    )
    return told


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A folder of the user's own stages."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab_of_stages").mkdir()
    return tmp_path / "lab_of_stages"


def test_a_users_stage_brings_its_own_trainer(tiny_recipe, tmp_path, lab):
    (lab / "mine.py").write_text(STAGE + MINE)
    trainer = trainer_of(tiny_recipe, tmp_path, stage="lab_of_stages.mine")
    assert type(trainer).__name__ == "Mine" and isinstance(trainer, CPTTrainer)


def test_a_users_stage_with_another_trainer_is_refused(tiny_recipe, tmp_path, lab):
    (lab / "another.py").write_text(STAGE + ANOTHER)
    with pytest.raises(RecipeError, match=r"`stage`: lab_of_stages.another .*CPTTrainer"):
        trainer_of(tiny_recipe, tmp_path, stage="lab_of_stages.another")


def test_a_users_stage_that_lacks_a_part_is_refused(lab):
    (lab / "half.py").write_text("CONFIG = COLUMNS = ()\n")
    with pytest.raises(RecipeError, match="lacks build_trainer"):
        find_stage("lab_of_stages.half")


@pytest.mark.parametrize(
    ("model", "frozen"), [({}, set()), ({"lora": {}}, {torch.bfloat16})], ids=["all", "adapter"]
)
def test_in_half_precision_frozen_weights_are_half_and_trained_ones_are_not(
    model, frozen, tiny_recipe, tmp_path
):
    base = save_llama(tmp_path / "base", tiny_recipe["tokenizer"]["path"], 1)
    training = {**tiny_recipe["training"], "bf16": True}
    recipe = Recipe.model_validate(
        {**tiny_recipe, "stage": "cpt", "model": {"path": str(base), **model}, "training": training}
    )
    data = type("Data", (), {"num_rows": 100, "held_out": {}, "form": "document"})
    tokenizer = AutoTokenizer.from_pretrained(base)
    weights = [
        *model_for(recipe, tokenizer, training_arguments(recipe, tmp_path, data)).parameters()
    ]
    assert {weight.dtype for weight in weights if weight.requires_grad} == {torch.float32}
    assert {weight.dtype for weight in weights if not weight.requires_grad} == frozen


def test_the_reference_has_the_weights_of_the_start_and_is_frozen(tmp_path):
    trainer = build_run("dpo", tmp_path)
    again = reference_model(trainer.recipe, make_tokenizer(), trainer.args)
    trained = model_for(trainer.recipe, make_tokenizer(), trainer.args)
    assert all(
        torch.equal(one, other)
        for one, other in zip(again.parameters(), trained.parameters(), strict=True)
    )
    assert not again.training and not any(
        parameter.requires_grad for parameter in again.parameters()
    )


# --- teachers ---


@pytest.fixture
def teacher(tokenizer_folder, tmp_path):
    return save_llama(tmp_path / "teacher", tokenizer_folder, 1)


def teach(path, tokenizer_folder, folder):
    """Build the teacher in a folder for a student of the tiny shape."""
    recipe = load_recipe(REPOSITORY / "recipes" / "tiny" / "pretrain.yaml")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    student = AutoModelForCausalLM.from_pretrained(
        save_llama(folder / "student", tokenizer_folder, 2)
    )
    named = None if path is None else str(path)
    arguments = DistillConfig(
        output_dir=str(folder), use_cpu=True, teacher_model_name_or_path=named
    )
    return build_teacher(recipe, student, tokenizer, arguments)


def test_a_teacher_is_whole_frozen_and_in_evaluation_mode(teacher, tokenizer_folder, tmp_path):
    built = teach(teacher, tokenizer_folder, tmp_path)
    weights = AutoModelForCausalLM.from_pretrained(teacher).state_dict()
    assert all(value.equal(weights[name]) for name, value in built.state_dict().items())
    assert not built.training and not any(
        parameter.requires_grad for parameter in built.parameters()
    )
    assert {parameter.dtype for parameter in built.parameters()} == {torch.float32}


def test_a_run_is_a_teacher_once_it_is_finished(teacher, tokenizer_folder, tmp_path):
    run = tmp_path / "runs" / "big"
    shutil.copytree(teacher, run / "final")
    (run / "recipe.yaml").write_text("name: big\n")
    with pytest.raises(RecipeError, match="training.teacher_model_name_or_path"):
        teach(run, tokenizer_folder, tmp_path)
    (run / "status.json").write_text(json.dumps({"state": "finished"}))
    assert teach(run, tokenizer_folder, tmp_path).config.hidden_size == TINY_LLAMA["hidden_size"]


def test_a_teacher_of_the_same_number_of_other_tokens_is_refused(
    teacher, tokenizer_folder, tmp_path
):
    path = teacher / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(RecipeError, match="2 tokens have other ids"):
        teach(teacher, tokenizer_folder, tmp_path)


@pytest.mark.parametrize("stage", ["dpo", "kto", "orpo", "cpo", "reward"])
def test_batches_of_examples_have_masks(stage, tmp_path, masks):
    build_run(stage, tmp_path)
    assert masks == [True]


@pytest.mark.parametrize(
    ("attention", "packing", "has_masks"),
    [("varlen", "best_fit", False), ("sdpa", "best_fit", True), ("sdpa", "token_budget", True)],
)
def test_packed_rows_have_masks_unless_attention_uses_bounds(
    attention, packing, has_masks, tiny_recipe, tmp_path, masks
):
    tiny_recipe["model"]["attention"] = attention
    tiny_recipe["data"]["packing"] = packing
    tiny_recipe["training"]["per_device_train_batch_size"] = 1
    trainer_of(tiny_recipe, tmp_path)
    assert masks == [has_masks]
