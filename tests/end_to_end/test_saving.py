"""Saving on several processes: the same files as the Trainer's, and the same numbers while training continues."""

import json
from pathlib import Path

import pytest
from launching import launch_to_its_end, run_program, zero_profile
from tiny import write_recipe

PROGRAM = Path(__file__).with_name("save_both_ways.py")


def recipe_of(sections, folder, stage=0, *, offload=False, steps=2):
    folder.mkdir()
    training = {**sections["training"], "bf16": stage > 0}
    if stage:
        training["deepspeed"] = zero_profile(folder, stage, offload=offload)
    budget = {"tokens": steps * 256, "global_batch_tokens": 256}
    changed = {**sections, "training": training, "budget": budget, "output_dir": str(folder / "runs")}
    return write_recipe(changed, folder / "r.yaml")


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "offload", "lora"), [(0, False, True), (2, False, False), (3, False, True), (3, True, False)]
)
def test_every_kind_of_run_saves_what_the_trainer_would_have_written(tiny_recipe, tmp_path, stage, offload, lora):
    if lora:
        launch_to_its_end(recipe_of(tiny_recipe, tmp_path / "base", steps=1))
        tiny_recipe["model"] = {"path": str(tmp_path / "base" / "runs" / "tiny" / "final"), "lora": {}}
        tiny_recipe["stage"] = "cpt"
    recipe = recipe_of(tiny_recipe, tmp_path / "run", stage, offload=offload)
    (tmp_path / "out").mkdir()
    run_program(PROGRAM, recipe, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "differences.json").read_text())
    assert found["ours"] == found["blocked"] == found["behind"] == [] and found["files"] >= 12
    assert max(found["sizes"]) < 1.05 * min(found["sizes"]), found["sizes"]
