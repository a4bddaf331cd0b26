"""Every shipped recipe loads, says what it is for, and every part that recipes share is used or usable."""

import re
from pathlib import Path

import pytest

from cpt.recipe.load import load_recipe
from cpt.recipe.references import REPOSITORY

FOLDER = REPOSITORY / "recipes"
PARTS = {"models", "mixtures", "demo"}
RECIPES = [path for path in sorted(FOLDER.rglob("*.yaml")) if path.relative_to(FOLDER).parts[0] not in PARTS]


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    """A recipe does not depend on the folder that it is loaded from."""
    monkeypatch.chdir(tmp_path)


def named(path: Path) -> str:
    return str(path.relative_to(FOLDER))


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_a_recipe_loads_and_says_what_it_is_for(path):
    assert load_recipe(path).name and path.read_text().startswith("# ")


@pytest.mark.parametrize("path", sorted((FOLDER / "models").rglob("*.yaml")), ids=named)
def test_a_model_fits_into_a_recipe(path, tmp_path):
    (tmp_path / "r.yaml").write_text(
        f"name: r\nmodel: {path}\ntokenizer: {{path: a/b}}\nstage: pretrain\ndata: {{sources: [{{path: a/b}}]}}\nbudget: {{tokens: 1}}\n"
    )
    overrides = [] if re.search(r"^path:", path.read_text(), re.MULTILINE) else ["model.from_scratch=true"]
    assert load_recipe(tmp_path / "r.yaml", overrides).model.config


@pytest.mark.parametrize("path", sorted((FOLDER / "mixtures").rglob("*.yaml")), ids=named)
def test_a_mixture_has_a_length_and_fits_into_a_recipe(path, tmp_path):
    (tmp_path / "r.yaml").write_text(f"name: r\nmodel: {{path: a/b}}\ndata: {path}\nbudget: {{epochs: 1}}\n")
    data = load_recipe(tmp_path / "r.yaml", ["data.total_tokens=null"]).data
    assert sum(source.weight for source in data.sources) == pytest.approx(1)
    assert all(source.max_documents for source in data.sources), "sets on the Hub are huge"
    assert "total_tokens: " in path.read_text()


def test_every_recipe_stands_in_the_readme():
    readme = (FOLDER / "README.md").read_text()
    assert all(f"`{named(path)}`" in readme for path in RECIPES)


def test_the_prototype_is_one_24_gb_card():
    training = load_recipe(FOLDER / "prototype_rtx4090.yaml").training
    assert (training["per_device_train_batch_size"], training["gradient_accumulation_steps"]) == (1, 8)
    assert training["gradient_checkpointing"] and training["bf16"] and training["deepspeed"].endswith("ds_config_8b_24gb.json")


def test_production_takes_half_a_million_tokens_in_a_step_on_4_gpus():
    recipe = load_recipe(FOLDER / "production_multi_gpu.yaml")
    rows = 4 * recipe.training["per_device_train_batch_size"] * recipe.training["gradient_accumulation_steps"]
    assert recipe.data.sequence_length == 8192 and rows * 8192 == 524_288


def test_the_6_gb_recipe_is_the_same_run_in_smaller_pieces():
    large, small = load_recipe(FOLDER / "gpt2_124m.yaml"), load_recipe(FOLDER / "gpt2_124m_6gb.yaml")
    for section in ("model", "tokenizer", "data", "budget", "optimizer", "schedule", "evaluation", "seed"):
        assert getattr(small, section) == getattr(large, section)
    assert small.training["per_device_train_batch_size"] < large.training["per_device_train_batch_size"]


def test_experiment_1_has_the_values_that_were_agreed():
    recipe = load_recipe(FOLDER / "experiments/active/exp001_llama7b_pretrain.yaml")
    assert (recipe.optimizer.learning_rate, recipe.optimizer.options) == (3e-4, {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1})
    assert recipe.schedule.options == {"warmup_tokens": 2000 * recipe.budget.global_batch_tokens, "floor": 0.1}
    assert (recipe.checkpoints.every_steps, recipe.checkpoints.keep, recipe.evaluation.every_steps) == (1000, 5, 500)
    assert recipe.training["max_grad_norm"] == 1.0 and recipe.training["logging_steps"] == 10
    assert recipe.monitoring.trackers == ["wandb"] and recipe.monitoring.project and recipe.model.from_scratch
