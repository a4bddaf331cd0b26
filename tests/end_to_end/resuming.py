"""Interrupt a run after the fact, let it go on, and hold it against the run that was never interrupted."""

import shutil

import torch
from launching import launch, losses, zero_profile
from safetensors.torch import load_file
from tiny import TINY_LLAMA, write_recipe


def interrupted_equals_straight(sections, tmp_path, *, at, stage=0, offload=False, processes=None):
    """Run to the end, take away what came after step `at`, and run again."""
    processes = processes or (2 if stage else 1)
    training = {**sections["training"]}
    if stage:
        training["deepspeed"] = zero_profile(tmp_path, stage, offload=offload)
    model = {**sections["model"], "config": {**TINY_LLAMA, "attention_dropout": 0.1}}
    recipe = write_recipe(
        {**sections, "model": model, "training": training, "checkpoints": {"every_steps": 1, "keep": None}}, tmp_path / "r.yaml"
    )
    run = tmp_path / "runs" / "tiny"
    way = "torchrun" if processes > 1 else "python"
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
