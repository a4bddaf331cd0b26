"""Every stage learns its tiny task through `accelerate launch` and under ZeRO, and resumes exactly."""

import json
import shutil

import pytest
from launching import launch_to_its_end, zero_profile
from learned import LEARNED
from resuming import differences, forget_after
from tiny import write_recipe
from tiny_tasks import TINY

from cpt.recipe.load import load_recipe

TOKENS_OF_STEP = {"sft": 1024, "dpo": 512, "kto": 256, "reward": 512, "grpo": 16 * 64}
# Four answers a prompt; thirty-two a generation serve four steps, so that most checkpoints are in the middle of one.
GRPO = {
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "num_generations": 4,
    "num_iterations": 2,
    "steps_per_generation": 2,
    "beta": 0.1,
}


def stages(*slow):
    """All of them: these in the slow tests, the others in the long ones."""
    return [pytest.param(stage, marks=pytest.mark.slow if stage in slow else pytest.mark.long) for stage in LEARNED]


@pytest.mark.parametrize("stage", stages("dpo"))
def test_a_stage_learns_under_zero_2(stage, tmp_path):
    given = load_recipe(TINY / f"{stage}.yaml").training
    halved = {key: value // 2 for key, value in given.items() if key == "gradient_accumulation_steps"}
    training = {"deepspeed": zero_profile(tmp_path, 2), **halved}
    sections = {"base": str(TINY / f"{stage}.yaml"), "name": stage, "output_dir": str(tmp_path), "training": training}
    launch_to_its_end(write_recipe(sections, tmp_path / "recipe.yaml"), processes=2)
    LEARNED[stage](tmp_path / stage)


def short_recipe(stage, folder, *, steps=8, every=2, **training):
    """The stage's tiny recipe for a few steps."""
    folder.mkdir(exist_ok=True)
    sections = {
        "base": str(TINY / f"{stage}.yaml"),
        "name": "tiny",
        "output_dir": str(folder / "runs"),
        "budget": {"tokens": steps * TOKENS_OF_STEP[stage], "epochs": None},
        "checkpoints": {"every_steps": every, "keep": None},
        "training": {**(GRPO if stage == "grpo" else {}), "logging_steps": 1, **training},
    }
    return write_recipe(sections, folder / "recipe.yaml")


def logged(run):
    """All that was logged of each step, except times and the machine's load."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = ("second", "time", "wait", "memory", "percent")
    return {
        line["step"]: {name: value for name, value in line.items() if not any(word in name for word in times)}
        for line in lines
        if "loss" in line
    }


@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        pytest.param("dpo", None, marks=pytest.mark.slow),
        pytest.param("reward", None, marks=pytest.mark.long),
        pytest.param("kto", None, marks=pytest.mark.long),
        pytest.param("dpo", 3, marks=pytest.mark.long),
    ],
)
def test_a_stage_resumes_bit_for_bit(stage, zero, tmp_path):
    training = {"deepspeed": zero_profile(tmp_path, zero), "gradient_accumulation_steps": 1} if zero else {}
    recipe, run = short_recipe(stage, tmp_path, **training), tmp_path / "runs" / "tiny"
    launch_to_its_end(recipe, processes=2 if zero else 1)
    straight, last = logged(run), shutil.copytree(run / "checkpoint-8", tmp_path / "straight")
    forget_after(run, 4)
    launch_to_its_end(recipe, processes=2 if zero else 1)
    assert len(straight) == 8 and logged(run) == straight
    assert differences(last, run / "checkpoint-8") == []
