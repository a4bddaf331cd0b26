"""On a CUDA GPU, in bfloat16: stages learn what their tiny recipes ask for, with the attention and the kernels that
are chosen there."""

import pytest
from launching import launch_to_its_end
from learned import LEARNED
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
