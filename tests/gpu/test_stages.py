"""On a CUDA GPU, in bfloat16: stages learn what their tiny recipes ask for, with the attention and the kernels that
are chosen there."""

import json
import math

import pytest
from launching import launch_to_its_end
from learned import LEARNED, figures
from tiny import write_recipe
from tiny_tasks import TINY

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stage", LEARNED)
def test_a_stage_learns_in_bfloat16(stage, tmp_path):
    sections = {
        "base": str(TINY / f"{stage}.yaml"),
        "name": stage,
        "output_dir": str(tmp_path),
        "training": {"bf16": True},
    }
    recipe = write_recipe(sections, tmp_path / "recipe.yaml")
    launch_to_its_end(recipe)
    LEARNED[stage](tmp_path / stage)


def test_preferences_with_masks_have_finite_gradients(tiny_recipe, tmp_path):
    """Rows of 192 tokens with padding: cuDNN's attention may give NaN for them (pytorch#196678)."""
    pairs = [
        json.loads(line) for line in (TINY / "data" / "preferences.jsonl").read_text().splitlines()
    ]
    for pair in pairs[::2]:
        pair["chosen"][0]["content"] *= 60  # longer than a row; the others are padded
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(pair) for pair in pairs))
    sections = {
        "base": str(TINY / "dpo.yaml"),
        "name": "masked",
        "output_dir": str(tmp_path),
        "model": {
            "config": {"max_position_embeddings": 256, "head_dim": 64},
            "dtype": "bfloat16",
            "parameters": None,
        },
        "data": {"sequence_length": 192, "sources": [{"path": str(tmp_path / "pairs.jsonl")}]},
        "budget": {"epochs": 1},
        "training": {"bf16": True, "logging_steps": 1},
    }
    launch_to_its_end(write_recipe(sections, tmp_path / "recipe.yaml"))
    norms, losses = figures(tmp_path / "masked", "grad_norm"), figures(tmp_path / "masked", "loss")
    assert len(norms) == 8 and all(
        math.isfinite(value) and value > 0 for value in (*norms, *losses)
    )
