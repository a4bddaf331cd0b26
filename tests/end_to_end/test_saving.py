"""Saving on several processes: the same files as the Trainer's, and the same numbers while training continues."""

import json
from pathlib import Path

import pytest
from launching import launch_to_its_end, run_program
from resuming import recipe_of

PROGRAM = Path(__file__).with_name("save_both_ways.py")


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "offload", "lora"), [(0, False, True), (2, False, False), (3, False, True), (3, True, False)]
)
def test_every_kind_of_run_saves_what_the_trainer_would_have_written(tiny_recipe, tmp_path, stage, offload, lora):
    tiny_recipe["budget"]["tokens"] = 512
    if lora:
        launch_to_its_end(recipe_of(tiny_recipe, tmp_path, name="base"))
        tiny_recipe |= {"stage": "cpt", "model": {"path": str(tmp_path / "runs" / "base" / "final"), "lora": {}}}
    tiny_recipe["training"]["bf16"] = stage > 0
    recipe = recipe_of(tiny_recipe, tmp_path, stage=stage, offload=offload)
    run_program(PROGRAM, recipe, tmp_path)
    found = json.loads((tmp_path / "differences.json").read_text())
    assert found["ours"] == found["blocked"] == found["behind"] == [] and found["files"] >= 12
    assert max(found["sizes"]) < 1.05 * min(found["sizes"]), found["sizes"]
