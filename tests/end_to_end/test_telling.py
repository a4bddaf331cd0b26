"""What processes really tell each other in a step, beside what the planner says: the engines' own collectives, counted
over gloo."""

import json
import subprocess
from pathlib import Path

import pytest
from launching import BIN, ROOT, environment_of_a_run, zero_profile
from tiny import write_recipe

from cpt.models.config import config_from
from cpt.planner.communication import REDUCE, traffic_of
from cpt.planner.facts import facts_of
from cpt.planner.setup import setup_of
from cpt.recipe.load import load_recipe
from cpt.stages.deepspeed_profile import read_profile

LET_GO = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}
SLOW, LONG = pytest.mark.slow, (pytest.mark.slow, pytest.mark.long)


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        pytest.param(1, {}, marks=LONG, id="ZeRO-1"),
        pytest.param(2, {}, marks=LONG, id="ZeRO-2"),
        pytest.param(3, {}, marks=LONG, id="ZeRO-3 that keeps a small model"),
        pytest.param(3, LET_GO, marks=SLOW, id="ZeRO-3"),
        pytest.param(None, {}, marks=LONG, id="FSDP2"),
    ],
)
def test_a_step_tells_the_bytes_that_the_plan_has(stage, options, tiny_recipe, tmp_path):
    tiny_recipe["budget"] = {"tokens": 3 * 384, "global_batch_tokens": 384}  # 3 micro-batches on each of two processes
    split: dict = {"fsdp": True}
    if stage is not None:
        profile = Path(zero_profile(tmp_path, stage))
        written = json.loads(profile.read_text())
        written["zero_optimization"] |= options
        profile.write_text(json.dumps(written))
        split = {"deepspeed": str(profile)}
    tiny_recipe["training"] |= {"per_device_train_batch_size": 1, **split}
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    words = [
        BIN / "torchrun",
        "--standalone",
        "--nproc_per_node=2",
        Path(__file__).with_name("telling.py"),
        tmp_path / "told.json",
    ]
    ended = subprocess.run(
        [*words, tmp_path / "r.yaml"],
        cwd=ROOT,
        env=environment_of_a_run(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    *_, told = json.loads((tmp_path / "told.json").read_text())
    assert recipe.model.config is not None
    profile = read_profile(split["deepspeed"]) if "deepspeed" in split else None
    setup = setup_of(recipe, 2, profile, attention="sdpa", on_cpu=True)
    planned = traffic_of(facts_of(config_from(recipe.model.config), None, 64), setup)
    reduced = sum(part.times * part.size for part in planned if part.how == REDUCE)
    others = sum(part.times * part.size for part in planned if part.how != REDUCE)
    assert told.get("all_reduce", 0) == pytest.approx(reduced, rel=0.05), told
    assert sum(told.values()) - told.get("all_reduce", 0) == pytest.approx(others, rel=0.05), told
