import re
from pathlib import Path

import pytest
from approved import check_approved
from typer.testing import CliRunner

from cpt.cli import application
from cpt.errors import RecipeError, ResourceError

pytestmark = pytest.mark.heavy
RECIPE = """\
name: run
stage: pretrain
model:
  from_scratch: true
  config:
    model_type: llama
    vocab_size: 32000
    hidden_size: 2048
    intermediate_size: 5632
    num_hidden_layers: 2
    num_attention_heads: 32
    num_key_value_heads: 4
tokenizer: {path: nowhere}
data: {sequence_length: 2048, sources: [{path: documents}]}
budget: {tokens: 1_000_000_000}
training: {per_device_train_batch_size: 64, bf16: true, torch_compile: false}
"""


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """`cpt plan recipe.yaml WORDS`"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return lambda *words: CliRunner().invoke(application(), ["plan", "recipe.yaml", *words])


def test_the_page_is_as_approved(plan):
    result = plan("--gpu", "RTX 4090", "--host-memory", "64", "--price-per-gpu-hour", "0.5")
    page = re.sub(
        r" *\d+\.\d+", " #.##", result.output
    )  # sizes depend on the version of transformers
    check_approved(page, Path(__file__).with_name("approved_plan.txt"))


def test_nothing_is_written_for_a_recipe_that_fits(plan):
    result = plan("--gpu", "H200", "--write", "fitted.yaml")
    assert isinstance(result.exception, RecipeError) and not Path("fitted.yaml").exists()


def test_without_a_gpu_a_recipe_for_a_cpu_is_planned_for_it(plan, monkeypatch, tmp_path):
    monkeypatch.setattr("cpt.commands.plan.find_gpus", list)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("bf16: true, ", ""))
    result = plan("budget.tokens=1_000_000")
    assert not isinstance(result.exception, ResourceError) and "CPU" in result.output


def test_a_limit_of_the_recipe_is_named(plan):
    limited, free = plan("--gpu", "H100", "safety.max_gpu_memory=0.5"), plan("--gpu", "H100")
    assert "safety.max_gpu_memory" in limited.output and "safety.max_gpu_memory" not in free.output


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (
            ("optimizer={name: adamw, release_gradients: true}", "training.max_grad_norm=0"),
            "release_gradients",
        ),
        (("training.fsdp=full_shard", "optimizer.name=muon"), "`training.fsdp`"),
        (("--network-gbit", "10"), "--network-gbit"),
    ],
)
def test_what_several_gpus_cannot_train_is_not_planned(plan, words, key):
    result = plan("--gpu", "H100", "--gpus", "2", *words)
    assert isinstance(result.exception, RecipeError) and key in str(result.exception)
