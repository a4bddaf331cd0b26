"""A run that goes on from a checkpoint is the run that was never interrupted, bit for bit."""

import shutil

import pytest
import torch
from launching import launch, losses, zero_profile
from safetensors.torch import load_file
from tiny import TINY_LLAMA, write_recipe


def interrupted_equals_straight(sections, tmp_path, *, at, stage=0, offload=False):
    """Run to the end, take away what came after step `at`, and run again."""
    processes = 2 if stage else 1
    training = {**sections["training"]}
    if stage:
        training["deepspeed"] = zero_profile(tmp_path, stage, offload=offload)
    model = {**sections["model"], "config": {**TINY_LLAMA, "attention_dropout": 0.1}}
    recipe = write_recipe(
        {**sections, "model": model, "training": training, "checkpoints": {"every_steps": 1, "keep": None}}, tmp_path / "r.yaml"
    )
    run = tmp_path / "runs" / "tiny"
    way = "torchrun" if stage else "python"
    first = launch(recipe, way=way, processes=processes)
    assert first.returncode == 0, first.stdout + first.stderr
    straight, weights = losses(run), load_file(run / "final" / "model.safetensors")
    for step in at:
        for folder in [run / "final", *(run / f"checkpoint-{later}" for later in range(step + 1, 9))]:
            shutil.rmtree(folder)
        (run / "status.json").unlink()
        again = launch(recipe, way=way, processes=processes)
        assert again.returncode == 0, again.stdout + again.stderr
        assert losses(run) == straight, f"resumed at {step}"
        resumed = load_file(run / "final" / "model.safetensors")
        assert all(torch.equal(resumed[name], weights[name]) for name in weights), f"resumed at {step}"


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
