"""What a recipe means for the planner: dtypes, sharding, attention, and whether layers are compiled."""

from dataclasses import replace

import pytest
from planned_setups import PLAIN
from tiny import tiny_config
from transformers import AutoConfig

from cpt.models.config import config_from
from cpt.models.inventory import build_on_meta
from cpt.planning.workload import (
    Sharding,
    attention_on_gpu,
    compiles,
    read_deepspeed_sharding,
    read_fsdp_sharding,
    read_setup,
)
from cpt.recipe.schema import Recipe


def recipe(stage="cpt", model=None, data=None, tokens=10_000_000, **training):
    return Recipe.model_validate(
        {
            "name": "run",
            "stage": stage,
            "model": {"path": "base", **(model or {})},
            "data": {"sequence_length": 512, "sources": [{"path": "documents"}], **(data or {})},
            "budget": {"tokens": tokens, "global_batch_tokens": 512 * 48},
            "training": training,
        }
    )


def weights_bytes(profile=None, on_cpu=False, **written):
    return read_setup(recipe(**written), 1, profile, attention="sdpa", on_cpu=on_cpu).weights_bytes


def test_weights_are_fp32_unless_something_else_keeps_masters():
    assert weights_bytes() == 4
    assert weights_bytes(bf16=True) == 2 and weights_bytes(bf16=True, on_cpu=True) == 4
    assert weights_bytes(bf16=True, fsdp=True) == 4
    assert weights_bytes(bf16=True, model={"dtype": "float32"}) == 4
    assert weights_bytes(bf16=True, profile={"zero_optimization": {"stage": 2}}) == 2


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"bf16": True}, "varlen"),
        ({}, "sdpa"),
        ({"model": {"attention": "flash_attention_2"}}, "flash_attention_2"),
        ({"model": {"attention": "my_lab.attention:sliding"}, "bf16": True}, "sdpa"),
    ],
)
def test_attention_is_planned_as_a_run_on_a_gpu_would_choose_it(written, expected):
    assert attention_on_gpu(recipe(**written), AutoConfig.for_model("llama")) == expected


def test_a_profile_has_deepspeeds_defaults():
    zero = read_deepspeed_sharding(
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    )
    assert zero is not None and (zero.reduce_bucket_size, zero.sub_group_size) == (
        500_000_000,
        1_000_000_000,
    )
    assert (
        zero.overlap_comm and read_deepspeed_sharding({"zero_optimization": {"stage": 0}}) is None
    )


def test_fsdp_shards_as_zero3_with_weights_as_layers_see_them():
    kept = read_fsdp_sharding(
        {"fsdp": "full_shard", "fsdp_config": {"fsdp_reshard_after_forward": False}}
    )
    assert (
        kept is not None
        and kept.stage == 3
        and kept.keeps_gathered
        and read_fsdp_sharding({"bf16": True}) is None
    )
    synced = {
        "fsdp": True,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    }
    assert read_fsdp_sharding(synced).reduces_each_micro_batch
    divided = replace(PLAIN, weights_bytes=4, zero=Sharding(3, is_fsdp=True))
    assert (
        divided.as_computed.weights_bytes == 2
        and replace(divided, half=False).as_computed.weights_bytes == 4
    )


# --- torch_compile: auto ------------------------------------------------------------------------------------------


def answer(written, *, zero3=False, on_cpu=False, family=None):
    model = None if family is None else build_on_meta(config_from(tiny_config(family)))
    return compiles(written, zero3=zero3, on_cpu=on_cpu, model=model)[0]


@pytest.mark.parametrize(
    "written", [recipe(), recipe(torch_compile="auto"), recipe("sft"), recipe("distill")]
)
def test_layers_are_compiled_by_default_on_a_gpu_only(written):
    assert answer(written) and not answer(written, on_cpu=True)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_recipe_decides_where_it_has_the_key(on_cpu):
    assert answer(recipe(torch_compile=True), on_cpu=on_cpu, zero3=True)
    assert answer(recipe(torch_compile_mode="default"), on_cpu=on_cpu)
    assert not answer(recipe(torch_compile=False), on_cpu=on_cpu)


@pytest.mark.parametrize(
    "written",
    [
        recipe("dpo"),
        recipe("gkd"),
        recipe(data={"packing": "token_budget"}),
        recipe(parallelism_config={"sp_size": 2}),
        recipe(tokens=512 * 48 * 99),
        recipe(model={"lora": {"r": 8, "quantize": "nf4"}}),
        recipe(model={"trust_remote_code": True}),
        recipe(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}),
    ],
)
def test_layers_are_not_compiled_where_it_was_not_tried_or_does_not_pay(written):
    assert not answer(written)


def test_recomputed_layers_are_compiled_under_fsdp_unless_transformers_recomputes_its_hooks(
    monkeypatch,
):
    divided = recipe(fsdp=True, gradient_checkpointing=True)
    assert answer(divided)
    monkeypatch.setattr("cpt.models.layers.CHECKPOINTS_AROUND_CALLS", True)
    assert not answer(divided) and answer(recipe(fsdp=True))


@pytest.mark.parametrize(
    ("written", "is_autocast"),
    [
        (recipe(bf16=True, model={"lora": {"r": 8}}), True),
        (recipe(bf16=True, model={"dtype": "float32"}), True),
        (recipe(bf16=True, fsdp=True), True),
        (recipe(bf16=True), False),
        (recipe(bf16=True, model={"dtype": "bfloat16"}), False),
        (recipe(), False),
    ],
)
def test_autocast_is_not_compiled_on_an_rtx_50(written, is_autocast):
    options = {"zero3": False, "on_cpu": False}
    assert compiles(written, capability="12.0", **options)[0] is not is_autocast
    assert compiles(written, capability="8.9", **options)[0] and compiles(written, **options)[0]


def test_the_model_decides_too():
    selective = recipe(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"selective": True}
    )
    assert answer(recipe(), family="minimind2_moe") and answer(selective, family="llama")
    assert not answer(selective, family="minimind2_moe")
    assert not answer(recipe(), family="nemotron_h")  # a state runs along its rows
