"""Every stage learns its tiny task under ZeRO."""

import pytest
from launching import launch_to_its_end, zero_profile
from learned import LEARNED
from tiny import write_recipe
from tiny_tasks import TINY

from cpt.recipe.load import load_recipe


@pytest.mark.long
@pytest.mark.parametrize("stage", LEARNED)
def test_a_stage_learns_under_zero_2(stage, tmp_path):
    given = load_recipe(TINY / f"{stage}.yaml").training
    halved = {
        key: value // 2 for key, value in given.items() if key == "gradient_accumulation_steps"
    }
    training = {"deepspeed": zero_profile(tmp_path, 2), **halved}
    sections = {
        "base": str(TINY / f"{stage}.yaml"),
        "name": stage,
        "output_dir": str(tmp_path),
        "training": training,
    }
    launch_to_its_end(write_recipe(sections, tmp_path / "recipe.yaml"), processes=2)
    LEARNED[stage](tmp_path / stage)
