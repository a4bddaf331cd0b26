"""Runs on examples and on completions that are stopped or killed go on exactly, as pre-training does."""

import os
import signal

import pytest
from launching import launch, losses
from signalling import pids_of, start, status, stops_and_goes_on, wait_for_step
from tiny import write_recipe
from tiny_tasks import TINY

STEPS, SAVED = 40, 6
TOKENS_OF_STEP = {"sft": 1024, "dpo": 512, "grpo": 16 * 64}
TRAINING = {
    "sft": {},
    "dpo": {},
    # Four answers a prompt; thirty-two a generation serve four steps, so that most checkpoints stand in the middle of
    # one.
    "grpo": {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "num_iterations": 2,
        "steps_per_generation": 2,
        "beta": 0.1,
    },
}


def recipe_in(folder, stage):
    folder.mkdir()
    sections = {
        "base": str(TINY / f"{stage}.yaml"),
        "name": "tiny",
        "output_dir": str(folder / "runs"),
        "budget": {"tokens": STEPS * TOKENS_OF_STEP[stage], "epochs": None},
        "checkpoints": {"every_steps": SAVED, "keep": None},
        "training": {**TRAINING[stage], "logging_steps": 1},
    }
    return write_recipe(sections, folder / "recipe.yaml")


def straight_run(folder, stage):
    ended = launch(recipe_in(folder, stage))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(losses(folder / "runs" / "tiny")) == STEPS
    return folder / "runs" / "tiny"


@pytest.mark.long
@pytest.mark.parametrize("stage", ["grpo", "sft", "dpo"])
def test_a_stage_that_is_told_to_stop_or_killed_goes_on_exactly(stage, tmp_path):
    straight = straight_run(tmp_path / "straight", stage)
    recipe, run = recipe_in(tmp_path / "stopped", stage), tmp_path / "stopped" / "runs" / "tiny"
    process = start(recipe)
    wait_for_step(run, 9, process)
    os.kill(pids_of(run)[0], signal.SIGKILL)
    process.wait(60)
    assert (run / "checkpoint-6").is_dir() and status(run)["state"] != "finished"
    stops_and_goes_on(recipe, straight, number=signal.SIGTERM, at=21)
