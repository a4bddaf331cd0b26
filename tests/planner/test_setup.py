import json

import pytest
from transformers import AutoConfig

from cpt.planner.setup import attention_on_gpu, setup_of, zero_of
from cpt.recipe.references import REPOSITORY
from cpt.recipe.schema import Recipe

PROFILES = REPOSITORY / "deepspeed_configs"


def recipe(*, model: dict | None = None, budget: dict | None = None, **training: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "run",
            "model": {"path": "base", **(model or {})},
            "data": {"sequence_length": 1024, "sources": [{"path": "documents"}]},
            "budget": {"tokens": 1_000_000, **(budget or {})},
            "training": training,
        }
    )


def test_weights_are_fp32_unless_something_else_keeps_masters():
    assert setup_of(recipe(bf16=True), 1, None, attention="sdpa").weights_bytes == 4
    assert setup_of(recipe(bf16=True), 1, {"zero_optimization": {"stage": 2}}, attention="sdpa").weights_bytes == 2
    assert setup_of(recipe(model={"lora": {}}, bf16=True), 1, None, attention="sdpa").weights_bytes == 2


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"bf16": True}, "varlen"),
        ({"model": {"dtype": "bfloat16"}}, "varlen"),
        ({}, "sdpa"),
        ({"model": {"attention": "flash_attention_2"}}, "flash_attention_2"),
        ({"model": {"attention": "my_lab.attention:sliding"}, "bf16": True}, "sdpa"),
    ],
)
def test_auto_attention_means_on_a_gpu_what_a_run_there_would_take(written, expected):
    assert attention_on_gpu(recipe(**written), AutoConfig.for_model("llama")) == expected


def test_sub_keys_of_checkpointing_are_read():
    given = recipe(gradient_checkpointing=True, gradient_checkpointing_kwargs={"selective": True, "every_n_layers": 3, "offload": True})
    setup = setup_of(given, 1, None, attention="sdpa")
    assert setup.checkpointing and setup.recomputing.selective and setup.recomputing.every_n_layers == 3 and setup.recomputing.offload


def test_the_global_batch_decides_the_accumulation():
    given = recipe(budget={"global_batch_tokens": 65_536}, per_device_train_batch_size=2)
    assert setup_of(given, 4, None, attention="sdpa").accumulation == 8
    assert setup_of(given, 8, None, attention="sdpa").tokens_per_step == 65_536


@pytest.mark.parametrize(
    ("file", "stage", "on_host"),
    [("zero1", 1, (False, False)), ("prototype", 2, (True, False)), ("production", 3, (False, False)), ("8b_24gb", 3, (True, True))],
)
def test_the_shipped_profiles_are_read(file, stage, on_host):
    zero = zero_of(json.loads((PROFILES / f"ds_config_{file}.json").read_text()))
    assert zero is not None and zero.stage == stage and (zero.offload_optimizer, zero.offload_parameters) == on_host


def test_what_a_profile_leaves_out_is_as_deepspeed_has_it():
    zero = zero_of({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}})
    assert zero is not None and zero.reduce_bucket == 500_000_000 and zero.sub_group == 1_000_000_000 and zero.overlap_comm
    assert zero_of({"zero_optimization": {"stage": 0}}) is None and zero_of({}) is None
