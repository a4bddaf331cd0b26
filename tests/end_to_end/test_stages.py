"""Every stage learns what its tiny recipe asks for, through `accelerate launch`: plain, and under ZeRO-2 on two
processes."""

import pytest
from launching import launch, zero_profile
from learned import LEARNED
from tiny import write_recipe
from tiny_tasks import TINY

from cpt.recipe.load import load_recipe


def run_tiny(stage, tmp_path, changes=None, *, way="accelerate", processes=1):
    """The stage's tiny recipe with changes; the run's folder."""
    sections = {"base": str(TINY / f"{stage}.yaml"), "name": stage, "output_dir": str(tmp_path), **(changes or {})}
    ended = launch(write_recipe(sections, tmp_path / "recipe.yaml"), way=way, processes=processes)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return tmp_path / stage


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage",
    [pytest.param(stage, marks=[] if stage == "grpo" else pytest.mark.long) for stage in LEARNED],
)
def test_a_stage_learns(stage, tmp_path):
    LEARNED[stage](run_tiny(stage, tmp_path))


def stages(*slow):
    """All of them: these in the slow tests, the others in the long ones."""
    return [pytest.param(stage, marks=pytest.mark.slow if stage in slow else pytest.mark.long) for stage in LEARNED]


@pytest.mark.parametrize("stage", stages("dpo"))
def test_a_stage_learns_under_zero_2(stage, tmp_path):
    given = load_recipe(TINY / f"{stage}.yaml").training
    halved = {key: value // 2 for key, value in given.items() if key == "gradient_accumulation_steps"}
    training = {"deepspeed": zero_profile(tmp_path, 2), **halved}
    LEARNED[stage](run_tiny(stage, tmp_path, {"training": training}, way="torchrun", processes=2))
