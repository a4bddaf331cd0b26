"""FSDP2 in one process on a CUDA GPU, over NCCL: the fused loss learns the same, and a run resumes bit for bit."""

import pytest
from launching import launch_to_its_end, losses
from resuming import differences, forget_after
from tiny import TINY_LLAMA, write_recipe

pytestmark = pytest.mark.gpu
GEMMA = {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 32,
    "final_logit_softcapping": 30.0,
}
CONFIGS = {
    "untied": TINY_LLAMA,
    "tied and capped": {**TINY_LLAMA, "model_type": "gemma2", "tie_word_embeddings": True, **GEMMA},
}
HALF_PRECISION = (
    1e-2  # relative, of a loss; a gradient of the embedding that comes late is off by 2e-2
)


def recipe_of(sections, tmp_path, name, config, **training):
    model = {"from_scratch": True, "config": config, "fused_loss": True}
    checkpoints = {"every_steps": 4, "keep": None}
    changes = {"name": name, "model": model, "checkpoints": checkpoints}
    training = {**sections["training"], "bf16": True, **training}
    return write_recipe({**sections, **changes, "training": training}, tmp_path / f"{name}.yaml")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_fused_loss_falls_as_without_sharding(tiny_recipe, tmp_path, config):
    launch_to_its_end(recipe_of(tiny_recipe, tmp_path, "plain", config))
    launch_to_its_end(recipe_of(tiny_recipe, tmp_path, "sharded", config, fsdp=True))
    expected = losses(tmp_path / "runs" / "plain")
    assert losses(tmp_path / "runs" / "sharded") == pytest.approx(expected, rel=HALF_PRECISION)


def test_a_sharded_run_resumes_bit_for_bit(tiny_recipe, tmp_path):
    recipe = recipe_of(tiny_recipe, tmp_path, "tiny", TINY_LLAMA, fsdp=True, full_determinism=True)
    launch_to_its_end(recipe)
    run = tmp_path / "runs" / "tiny"
    expected, last = losses(run), (run / "checkpoint-8").rename(tmp_path / "straight")
    forget_after(run, 4)
    launch_to_its_end(recipe)
    assert losses(run) == expected and differences(last, run / "checkpoint-8") == []
