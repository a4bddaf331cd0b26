import json
import shutil

import pytest
import torch
from tiny_checkpoints import save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from cpt.errors import RecipeError
from cpt.recipe.load import REPOSITORY, load_recipe
from cpt.stages.distill import DistillConfig
from cpt.stages.models import build_teacher


@pytest.fixture
def built(tokenizer_folder, tmp_path):
    """Build the teacher that lies in a folder, for a student of the tiny shape."""
    folder = save_llama(tmp_path / "teacher", tokenizer_folder, 1)

    def build(path=folder, **arguments):
        recipe = load_recipe(REPOSITORY / "recipes" / "tiny" / "pretrain.yaml")
        student = AutoModelForCausalLM.from_pretrained(folder)
        asked = DistillConfig(
            output_dir=str(tmp_path), use_cpu=True, teacher_model_name_or_path=str(path) if path else None, **arguments
        )
        assert isinstance(asked, TrainingArguments)
        return build_teacher(recipe, student, AutoTokenizer.from_pretrained(tokenizer_folder), asked)

    build.folder = folder
    return build


def test_a_teacher_is_whole_frozen_and_in_evaluation_mode(built):
    teacher = built()
    weights = AutoModelForCausalLM.from_pretrained(built.folder).state_dict()
    assert all(value.equal(weights[name]) for name, value in teacher.state_dict().items())
    assert not teacher.training and not any(parameter.requires_grad for parameter in teacher.parameters())
    assert {parameter.dtype for parameter in teacher.parameters()} == {torch.float32}


def test_a_finished_run_is_its_model(built, tmp_path):
    run = tmp_path / "runs" / "big"
    shutil.copytree(built.folder, run / "final")
    (run / "recipe.yaml").write_text("name: big\n")
    with pytest.raises(
        RecipeError, match=r"`training.teacher_model_name_or_path`: .*big is a run that has not finished"
    ):
        built(run)
    (run / "status.json").write_text(json.dumps({"state": "finished"}))
    assert built(run).config.hidden_size == 32


def test_another_number_of_tokens_is_refused(built, tokenizer_folder, tmp_path):
    other = save_llama(tmp_path / "other", tokenizer_folder, 1, vocab_size=384)
    with pytest.raises(
        RecipeError, match=r"`training.teacher_model_name_or_path`: .*other has 384 tokens and the model 320"
    ):
        built(other)


def test_the_same_number_of_other_tokens_is_refused(built):
    path = built.folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    one, two = "a", "b"
    words[one], words[two] = words[two], words[one]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(RecipeError, match=f"2 tokens have other ids in .*, as 'a': .* here, {words[one]} there"):
        built()


@pytest.mark.parametrize(("path", "said"), [(None, "is missing"), ("./gone", "./gone does not exist")])
def test_a_teacher_that_is_not_there_is_refused_by_its_key(built, path, said):
    with pytest.raises(RecipeError, match=f"`training.teacher_model_name_or_path`:? ?{said}"):
        built(path)
