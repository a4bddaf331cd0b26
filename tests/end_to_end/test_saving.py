"""Saving on several processes: the same files as the Trainer's, and the same numbers when training goes on
meanwhile."""

import json
import subprocess
import sys

import pytest
from launching import BIN, ROOT, environment_of_a_run, zero_profile
from save_both_ways import differing
from tiny import TINY_LLAMA, write_recipe

from cpt.checkpoints.manifest import damages
from cpt.runs.events import read_events

# These hold times, paths, or what the guard measured.
SAID_OTHERWISE = ("manifest.json", "training_args.bin", "trainer_state.json", "config.json", "safety.json")


def start(program, recipe, *arguments, processes=2):
    words = [BIN / "torchrun", "--standalone", f"--nproc_per_node={processes}", program, recipe, *arguments]
    ended = subprocess.run(
        list(map(str, words)), cwd=ROOT, env=environment_of_a_run(), capture_output=True, text=True, timeout=540
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def recipe_of(sections, folder, stage, *, offload=False, steps=2, **changes):
    folder.mkdir()
    training = {**sections["training"], "bf16": stage > 0}
    if stage:
        training["deepspeed"] = zero_profile(folder, stage, offload=offload)
    budget = {"tokens": steps * 256, "global_batch_tokens": 256}
    changed = {**sections, "training": training, "budget": budget, "output_dir": str(folder / "runs"), **changes}
    return write_recipe(changed, folder / "r.yaml")


@pytest.mark.long
@pytest.mark.parametrize(("stage", "offload"), [(0, False), (2, False), (3, False), (3, True)])
@pytest.mark.parametrize("lora", [False, True])
def test_every_kind_of_run_saves_what_the_trainer_would_have_written(tiny_recipe, tmp_path, stage, offload, lora):
    if lora:
        start_model = recipe_of(tiny_recipe, tmp_path / "base", 0, steps=1)
        subprocess.run(
            [sys.executable, "cpt/train.py", start_model],
            cwd=ROOT,
            env=environment_of_a_run(),
            check=True,
            capture_output=True,
        )
        tiny_recipe["model"] = {"path": str(tmp_path / "base" / "runs" / "tiny" / "final"), "lora": {}}
        tiny_recipe["stage"] = "cpt"
    recipe = recipe_of(tiny_recipe, tmp_path / "run", stage, offload=offload)
    (tmp_path / "out").mkdir()
    start("tests/end_to_end/save_both_ways.py", recipe, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "differences.json").read_text())
    assert found["ours"] == found["blocked"] == found["behind"] == [] and found["files"] >= 12
    assert max(found["sizes"]) < 1.05 * min(found["sizes"]), found["sizes"]


@pytest.mark.long
@pytest.mark.parametrize(("stage", "offload"), [(0, False), (2, False), (2, True), (3, False), (3, True)])
def test_what_is_saved_behind_the_training_holds_the_numbers_of_its_step(tiny_recipe, tmp_path, stage, offload):
    tiny_recipe["model"]["config"] = {**TINY_LLAMA, "attention_dropout": 0.1}
    saved = {"every_steps": 1, "keep": None}
    waiting = recipe_of(tiny_recipe, tmp_path / "waiting", stage, offload=offload, steps=5, checkpoints=saved)
    behind = recipe_of(
        tiny_recipe, tmp_path / "behind", stage, offload=offload, steps=5, checkpoints={**saved, "in_background": True}
    )
    start("cpt/train.py", waiting)
    start("tests/end_to_end/save_behind.py", behind)
    for step in range(1, 6):
        one, other = (tmp_path / name / "runs" / "tiny" / f"checkpoint-{step}" for name in ("waiting", "behind"))
        assert damages(one) == damages(other) == []
        assert [name for name in differing(one, other) if name not in SAID_OTHERWISE] == []


KINDS = [  # stage, in the background
    pytest.param(3, True, marks=pytest.mark.slow),
    *(pytest.param(*kind, marks=pytest.mark.long) for kind in ((0, False), (2, False), (2, True), (3, False))),
]


@pytest.mark.long
@pytest.mark.parametrize(("stage", "behind"), KINDS)
def test_a_first_save_that_the_disk_changed_is_not_published_whatever_the_run(tiny_recipe, tmp_path, stage, behind):
    saved = {"every_steps": 1, "keep": None, "in_background": behind}
    start(
        "tests/end_to_end/first_saves.py", recipe_of(tiny_recipe, tmp_path / "run", stage, steps=3, checkpoints=saved)
    )
    run = tmp_path / "run" / "runs" / "tiny"
    assert [(event["kind"], event["step"]) for event in read_events(run)] == [("save_failed", 1), ("saved_again", 2)]
    assert not (run / "checkpoint-1").exists() and damages(run / "checkpoint-2") == damages(run / "checkpoint-3") == []
