"""ZeRO-3 on a CUDA GPU: `generate` works while the weights are sharded, or on the host."""

import json

import pytest
from launching import launch_to_its_end, zero_profile
from tiny import write_recipe

pytestmark = pytest.mark.gpu
PROMPTS = ["the model reads", "a document"]


@pytest.mark.parametrize("offload", [False, True], ids=["on the GPU", "on the host"])
def test_prompts_are_continued_before_and_after_a_run_with_zero3(tiny_recipe, tmp_path, offload):
    training = {
        **tiny_recipe["training"],
        "deepspeed": zero_profile(tmp_path, 3, offload=offload),
        "bf16": True,
    }
    sections = {**tiny_recipe, "evaluation": {"prompts": PROMPTS}, "training": training}
    launch_to_its_end(write_recipe(sections, tmp_path / "tiny.yaml"))
    lines = [
        json.loads(line) for line in (tmp_path / "runs/tiny/samples.jsonl").read_text().splitlines()
    ]
    assert [(line["step"], line["prompt"]) for line in lines] == [
        (step, text) for step in (0, 8) for text in PROMPTS
    ]
    assert all(line["continuation"] for line in lines)
