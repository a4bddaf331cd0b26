import pytest
from typer.testing import CliRunner

from cpt.cli import application
from cpt.errors import RecipeError, ResourceError

RECIPE = """\
name: run
stage: pretrain
model:
  from_scratch: true
  config: {model_type: llama, vocab_size: 32000, hidden_size: 2048, intermediate_size: 5632, num_hidden_layers: 22, num_attention_heads: 32,
           num_key_value_heads: 4}
tokenizer: {path: nowhere}
data: {sequence_length: 2048, sources: [{path: documents}]}
budget: {tokens: 1_000_000_000}
training: {per_device_train_batch_size: 8, bf16: true}
"""  # noqa: E501


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)

    def run(*words):
        return CliRunner().invoke(application("plan"), ["plan", "recipe.yaml", *words])

    return run


def test_nothing_is_written_for_a_recipe_that_fits(plan):
    result = plan("--gpu", "H200", "--write", "fitted.yaml")
    assert isinstance(result.exception, RecipeError) and "fits as it is" in str(result.exception)


def test_without_a_gpu_a_recipe_for_a_cpu_is_planned_for_it(plan, monkeypatch, tmp_path):
    monkeypatch.setattr("cpt.commands.plan.find_gpus", list)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace(", bf16: true", ""))
    result = plan("budget.tokens=1_000_000")
    assert not isinstance(result.exception, ResourceError) and "CPU" in result.output


def test_released_gradients_are_for_one_gpu(plan):
    releases = ("optimizer={name: adamw, release_gradients: true}", "training.max_grad_norm=0")
    assert isinstance(plan("--gpu", "H100", "--gpus", "2", *releases).exception, RecipeError)
    assert plan("--gpu", "H100", *releases).exit_code == 0


def test_what_fsdp_cannot_train_is_not_planned(plan):
    result = plan("training.fsdp=full_shard", "optimizer.name=muon", "--gpu", "H100", "--gpus", "8")
    assert isinstance(result.exception, RecipeError)
    assert "`training.fsdp`" in str(result.exception) and "muon" in str(result.exception)


@pytest.mark.slow
def test_a_stage_with_a_reference_tells_of_it(plan):
    result = plan("stage=dpo", "--gpu", "H200", "data.sequence_length=1024")
    assert "  reference model  " in result.output and "16 x 1,024 tokens at once (8 pairs)" in result.output
    assert "reference model  " not in plan("stage=dpo", "--lora", "--gpu", "H200", "data.sequence_length=1024").output
    assert isinstance(plan("stage=dpo", "--gpu", "H200", "--exact").exception, RecipeError)


ZERO3 = '{"zero_optimization": {"stage": 3, "overlap_comm": true}, "bf16": {"enabled": "auto"}}'
SMALL = ("model.config.num_hidden_layers=4", "training.deepspeed=zero3.json", "budget.global_batch_tokens=524288")


def test_several_machines_wait_for_a_slow_network(plan, tmp_path):
    (tmp_path / "zero3.json").write_text(ZERO3)
    words = ("--gpu", "H100-80GB", "--nodes", "2", "--gpus", "16")
    result = plan(*words, *SMALL)
    assert result.exit_code == 0, result.output
    assert "16 x H100 in 2 machines" in result.output and "Memory of each machine's host:" in result.output
    assert "in 2 machines, each with" in result.output and "waiting for other GPUs" not in result.output
    assert "waiting for other GPUs" in plan(*words, "--network-gbit", "10", *SMALL).output
    assert isinstance(plan("--gpu", "H100", "--network-gbit", "10").exception, RecipeError)
