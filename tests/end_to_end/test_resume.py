"""A run that goes on from a checkpoint is the run that was never interrupted, bit for bit."""

import pytest
from launching import launch
from resuming import interrupted_equals_straight
from tiny import write_recipe


def test_a_plain_run_resumes_bit_for_bit(tiny_recipe, tmp_path):
    interrupted_equals_straight(tiny_recipe, tmp_path, at=(3,))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "offload"), [(0, False), (2, False), (2, True), (3, False), (3, True)])
def test_every_kind_of_run_resumes_bit_for_bit(tiny_recipe, tmp_path, stage, offload):
    tiny_recipe["training"]["bf16"] = bool(stage)
    interrupted_equals_straight(tiny_recipe, tmp_path, at=(6, 3, 1), stage=stage, offload=offload)


def test_a_finished_run_is_left_as_it_is(tiny_recipe, tmp_path):
    recipe = write_recipe(tiny_recipe, tmp_path / "r.yaml")
    assert launch(recipe).returncode == 0
    run = tmp_path / "runs" / "tiny"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    again = launch(recipe)
    assert again.returncode == 0 and "is finished" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
