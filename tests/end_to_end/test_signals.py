"""A run that is told to stop saves where it stands, and goes on as if nothing had been."""

import shutil
import signal

import pytest
from launching import launch, zero_profile
from signalling import stops_and_goes_on, to_group, to_last_rank, to_launcher, to_run
from tiny import TINY_LLAMA, write_recipe

STEPS = 120


def recipe_in(folder, sections, stage=0):
    training = {**sections["training"], **({"deepspeed": zero_profile(folder, stage), "bf16": True} if stage else {})}
    model = {**sections["model"], "config": {**TINY_LLAMA, "attention_dropout": 0.1}}
    changed = {"output_dir": str(folder / "runs"), "budget": {"tokens": STEPS * 256, "global_batch_tokens": 256}}
    return write_recipe({**sections, "model": model, "training": training, **changed}, folder / "r.yaml")


def straight_run(folder, sections, **launched):
    folder.mkdir()
    done = launch(recipe_in(folder, sections, launched.pop("stage", 0)), **launched)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "tiny"


def test_a_run_that_is_told_to_stop_saves_and_goes_on_exactly(tiny_recipe, tmp_path):
    straight = straight_run(tmp_path / "straight", tiny_recipe)
    (tmp_path / "stopped").mkdir()
    stops_and_goes_on(recipe_in(tmp_path / "stopped", tiny_recipe), straight, number=signal.SIGTERM)


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_signal_to_whoever_gets_it_in_every_kind_of_run(tiny_recipe, tmp_path, stage):
    straight = straight_run(tmp_path / "straight", tiny_recipe, stage=stage, way="torchrun", processes=2)
    ways = [
        (signal.SIGTERM, to_launcher),
        (signal.SIGTERM, to_last_rank),
        (signal.SIGINT, to_group),
        (signal.SIGUSR1, to_run),
        (signal.SIGUSR1, to_launcher),  # which kills torchrun, and leaves its processes to themselves
        (signal.SIGHUP, to_last_rank),
    ]
    for number, send in ways[:: 1 if stage == 2 else 2]:
        folder = tmp_path / "stopped"
        folder.mkdir()
        stops_and_goes_on(recipe_in(folder, tiny_recipe, stage), straight, number=number, send=send, way="torchrun", processes=2)
        shutil.rmtree(folder)
