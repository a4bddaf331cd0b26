from pathlib import Path

import pytest
from approved import check_approved
from typer.testing import CliRunner

from cpt.cli import application
from cpt.errors import RecipeError, ResourceError

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
    num_hidden_layers: 22
    num_attention_heads: 32
    num_key_value_heads: 4
tokenizer: {path: nowhere}
data: {sequence_length: 2048, sources: [{path: documents}]}
budget: {tokens: 1_000_000_000}
training: {per_device_train_batch_size: 8, bf16: true}
"""


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """`cpt plan recipe.yaml WORDS`"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return lambda *words: CliRunner().invoke(application("plan"), ["plan", "recipe.yaml", *words])


def test_the_page_is_as_approved(plan):
    result = plan("--gpu", "RTX 4090", "--host-memory", "64", "--price-per-gpu-hour", "0.5")
    check_approved(result.output, Path(__file__).with_name("approved_plan.txt"))


def test_nothing_is_written_for_a_recipe_that_fits(plan):
    result = plan("--gpu", "H200", "--write", "fitted.yaml")
    assert isinstance(result.exception, RecipeError) and not Path("fitted.yaml").exists()


def test_without_a_gpu_a_recipe_for_a_cpu_is_planned_for_it(plan, monkeypatch, tmp_path):
    monkeypatch.setattr("cpt.commands.plan.find_gpus", list)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace(", bf16: true", ""))
    result = plan("budget.tokens=1_000_000")
    assert not isinstance(result.exception, ResourceError) and "CPU" in result.output


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("optimizer={name: adamw, release_gradients: true}", "training.max_grad_norm=0"), "release_gradients"),
        (("training.fsdp=full_shard", "optimizer.name=muon"), "`training.fsdp`"),
        (("--network-gbit", "10"), "--network-gbit"),
    ],
)
def test_what_several_gpus_cannot_train_is_not_planned(plan, words, key):
    result = plan("--gpu", "H100", "--gpus", "2", *words)
    assert isinstance(result.exception, RecipeError) and key in str(result.exception)


@pytest.mark.slow
def test_a_reference_model_is_planned_unless_there_are_adapters(plan):
    result = plan("stage=dpo", "--gpu", "H200", "data.sequence_length=1024")
    assert "  reference model  " in result.output and "(8 pairs)" in result.output
    assert "reference model  " not in plan("stage=dpo", "--lora", "--gpu", "H200", "data.sequence_length=1024").output
    assert isinstance(plan("stage=dpo", "--gpu", "H200", "--exact").exception, RecipeError)


def test_several_machines_wait_for_a_slow_network(plan, tmp_path):
    zero3 = '{"zero_optimization": {"stage": 3, "overlap_comm": true}, "bf16": {"enabled": "auto"}}'
    (tmp_path / "zero3.json").write_text(zero3)
    small = ("model.config.num_hidden_layers=4", "training.deepspeed=zero3.json", "budget.global_batch_tokens=524288")
    words = ("--gpu", "H100-80GB", "--nodes", "2", "--gpus", "16", *small)
    result = plan(*words)
    assert result.exit_code == 0, result.output
    assert "16 x H100 in 2 machines" in result.output and "waiting for other GPUs" not in result.output
    assert "waiting for other GPUs" in plan(*words, "--network-gbit", "10").output
