"""A run of any stage that goes on from a checkpoint is the run that was never interrupted, bit for bit."""

import json
import shutil

import pytest
from launching import launch, zero_profile
from resuming import differences, forget_after
from tiny import write_recipe
from tiny_tasks import TINY

STEPS, SAVED = 8, 2
TIMES = ("second", "time", "wait")
BUDGET = {"sft": 1024, "dpo": 512, "kto": 256, "reward": 512}  # tokens of a step


def short_run(stage, tmp_path, **training):
    """The stage's tiny recipe for a few steps, saved every other one."""
    sections = {
        "base": str(TINY / f"{stage}.yaml"),
        "name": stage,
        "output_dir": str(tmp_path / "runs"),
        "budget": {"tokens": STEPS * BUDGET[stage], "epochs": None},
        "checkpoints": {"every_steps": SAVED, "keep": None},
        "training": {"logging_steps": 1, **training},
    }
    return write_recipe(sections, tmp_path / "recipe.yaml")


def figures(run):
    """All that was logged, but for times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {name: value for name, value in line.items() if not any(word in name for word in TIMES)}
        for line in lines
        if "loss" in line
    ]
    return {line["step"]: line for line in kept}


def interrupted_equals_straight(stage, tmp_path, *, at, processes=1, **training):
    """Run to the end, take away what came after a step, and run again."""
    recipe, run = short_run(stage, tmp_path, **training), tmp_path / "runs" / stage
    way = "torchrun" if processes > 1 else "python"
    first = launch(recipe, way=way, processes=processes)
    assert first.returncode == 0, first.stdout + first.stderr
    straight, last = figures(run), shutil.copytree(run / f"checkpoint-{STEPS}", tmp_path / "straight")
    assert len(straight) == STEPS
    forget_after(run, at)
    again = launch(recipe, way=way, processes=processes)
    assert again.returncode == 0, again.stdout + again.stderr
    resumed = figures(run)
    assert [
        (step, name) for step, line in straight.items() for name in line if resumed[step][name] != line[name]
    ] == []
    assert differences(last, run / f"checkpoint-{STEPS}") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", ["dpo", *(pytest.param(stage, marks=pytest.mark.long) for stage in ("sft", "reward", "kto"))]
)
def test_a_stage_resumes_bit_for_bit(stage, tmp_path):
    interrupted_equals_straight(stage, tmp_path, at=4)


@pytest.mark.long
@pytest.mark.parametrize("zero", [2, pytest.param(3, marks=pytest.mark.long)])
def test_dpo_resumes_bit_for_bit_under_zero(tmp_path, zero):
    profile = {"deepspeed": zero_profile(tmp_path, zero), "gradient_accumulation_steps": 1}
    interrupted_equals_straight("dpo", tmp_path, at=4, processes=2, **profile)
