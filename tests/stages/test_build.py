import json

import pytest
import torch
from tiny import TINY_LLAMA, write_recipe
from transformers import LlamaConfig, LlamaForCausalLM

from cpt.data.rows.build import build_data
from cpt.errors import RecipeError
from cpt.models.build import build_model
from cpt.models.fused_loss import FusedLoss
from cpt.recipe.load import load_recipe
from cpt.stages.build import build_trainer
from cpt.stages.models import model_for
from cpt.tokenizer.load import load_tokenizer
from cpt.training.arguments import training_arguments
from cpt.training.trainer import CPTTrainer


def test_a_notebook_builds_and_trains_with_plain_functions(tiny_recipe, tmp_path, corpus):
    tiny_recipe["evaluation"] = {"perplexity": [{"path": str(corpus / "held_out.jsonl")}], "prompts": ["the model"]}
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "recipe.yaml"))
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=recipe.seed, evaluation=recipe.evaluation)
    trainer = build_trainer(recipe, build_model(recipe.model, tokenizer), tokenizer, data)
    trainer.train()
    run = tmp_path / "runs" / "tiny"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))
    assert [line["share_domain"] for line in lines if "loss" in line][-1] == pytest.approx(0.7, abs=0.03)  # 32 rows
    assert [line["step"] for line in lines if "eval_held_out_loss" in line] == [0, 8]
    assert [json.loads(line)["step"] for line in (run / "samples.jsonl").read_text().splitlines()] == [0, 8]


def test_a_users_stage_brings_its_own_trainer(tiny_recipe, tmp_path, monkeypatch):
    (tmp_path / "lab_of_stages").mkdir()
    (tmp_path / "lab_of_stages" / "stage.py").write_text(
        "from transformers import TrainingArguments as CONFIG\n"
        "from cpt.training.trainer import CPTTrainer\n"
        "COLUMNS = ('text',)\n"
        "class Mine(CPTTrainer):\n    pass\n"
        "def build_trainer(recipe, model, tokenizer, data, arguments, length):\n"
        "    return Mine(recipe, model, arguments, rows=data.rows, length=length, tokenizer=tokenizer)\n"
    )
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(write_recipe({**tiny_recipe, "stage": "lab_of_stages.stage"}, tmp_path / "recipe.yaml"))
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=recipe.seed)
    trainer = build_trainer(recipe, build_model(recipe.model, tokenizer), tokenizer, data)
    assert type(trainer).__name__ == "Mine" and isinstance(trainer, CPTTrainer)


def test_a_users_stage_with_another_trainer_is_refused(tiny_recipe, tmp_path, monkeypatch):
    (tmp_path / "other_lab").mkdir()
    (tmp_path / "other_lab" / "stage.py").write_text(
        "from transformers import Trainer, TrainingArguments as CONFIG\n"
        "COLUMNS = ('text',)\n"
        "def build_trainer(recipe, model, tokenizer, data, arguments, length):\n"
        "    return Trainer(model, arguments, train_dataset=data.rows)\n"
    )
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(write_recipe({**tiny_recipe, "stage": "other_lab.stage"}, tmp_path / "recipe.yaml"))
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=recipe.seed)
    with pytest.raises(
        RecipeError,
        match=r"`stage`: other_lab.stage builds a Trainer, .* Derive it from cpt.training.trainer.CPTTrainer",
    ):
        build_trainer(recipe, build_model(recipe.model, tokenizer), tokenizer, data)


def losses_of(recipe, tmp_path, name, **changes):
    loaded = load_recipe(write_recipe({**recipe, "name": name, **changes}, tmp_path / f"{name}.yaml"))
    tokenizer = load_tokenizer(loaded.tokenizer, loaded.model)
    data = build_data(loaded.data, tokenizer, seed=loaded.seed)
    trainer = build_trainer(loaded, build_model(loaded.model, tokenizer), tokenizer, data)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], trainer


def test_a_loss_in_chunks_is_the_same_loss(tiny_recipe, tmp_path):
    plain, _ = losses_of(tiny_recipe, tmp_path, "plain")
    fused, trainer = losses_of(tiny_recipe, tmp_path, "fused", model={**tiny_recipe["model"], "fused_loss": True})
    assert fused == pytest.approx(plain, rel=1e-5)
    assert isinstance(trainer.model.loss_function, FusedLoss)


def test_frozen_weights_of_half_precision_runs_are_half_and_trained_ones_are_not(
    tiny_recipe, tmp_path, tokenizer_folder
):
    LlamaForCausalLM(LlamaConfig(**TINY_LLAMA)).save_pretrained(tmp_path / "base")

    def model_of(**model):
        sections = {
            **tiny_recipe,
            "stage": "cpt",
            "model": {"path": str(tmp_path / "base"), **model},
            "training": {**tiny_recipe["training"], "bf16": True},
        }
        recipe = load_recipe(write_recipe({**sections, "output_dir": str(tmp_path)}, tmp_path / "recipe.yaml"))
        tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
        arguments = training_arguments(recipe, tmp_path / "run", build_data(recipe.data, tokenizer, seed=1))
        return model_for(recipe, tokenizer, arguments)

    assert {parameter.dtype for parameter in model_of().parameters()} == {torch.float32}
    adapted = model_of(lora={})
    assert {parameter.dtype for parameter in adapted.parameters() if not parameter.requires_grad} == {torch.bfloat16}
    assert {parameter.dtype for parameter in adapted.parameters() if parameter.requires_grad} == {torch.float32}
