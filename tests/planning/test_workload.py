from dataclasses import replace

import pytest
from planned_setups import PLAIN
from transformers import AutoConfig

from cpt.planning.workload import Sharding, attention_on_gpu, read_deepspeed_sharding, read_fsdp_sharding, read_setup
from cpt.recipe.schema import Recipe


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


def setup(gpus=1, profile=None, on_cpu=False, **written):
    return read_setup(recipe(**written), gpus, profile, attention="sdpa", on_cpu=on_cpu)


def test_weights_are_fp32_unless_something_else_keeps_masters():
    assert setup().weights_bytes == 4
    assert setup(bf16=True).weights_bytes == 2 and setup(bf16=True, on_cpu=True).weights_bytes == 4
    assert setup(bf16=True, fsdp=True).weights_bytes == 4
    assert setup(bf16=True, model={"dtype": "float32"}).weights_bytes == 4
    assert setup(bf16=True, profile={"zero_optimization": {"stage": 2}}).weights_bytes == 2


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"bf16": True}, "varlen"),
        ({}, "sdpa"),
        ({"model": {"attention": "flash_attention_2"}}, "flash_attention_2"),
        ({"model": {"attention": "my_lab.attention:sliding"}, "bf16": True}, "sdpa"),
    ],
)
def test_auto_attention_means_on_a_gpu_what_a_run_there_would_take(written, expected):
    assert attention_on_gpu(recipe(**written), AutoConfig.for_model("llama")) == expected


def test_what_a_profile_leaves_out_is_as_deepspeed_has_it():
    zero = read_deepspeed_sharding({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}})
    assert zero is not None and (zero.reduce_bucket_size, zero.sub_group_size) == (500_000_000, 1_000_000_000)
    assert zero.overlap_comm and read_deepspeed_sharding({"zero_optimization": {"stage": 0}}) is None


def test_fsdp_divides_as_zero3_does_with_weights_as_layers_see_them():
    kept = read_fsdp_sharding({"fsdp": "full_shard", "fsdp_config": {"fsdp_reshard_after_forward": False}})
    assert kept is not None and kept.stage == 3 and kept.keeps_gathered and read_fsdp_sharding({"bf16": True}) is None
    synced = {"fsdp": True, "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    assert read_fsdp_sharding(synced).reduces_each_micro_batch
    divided = replace(PLAIN, weights_bytes=4, zero=Sharding(3, is_fsdp=True))
    assert divided.as_computed.weights_bytes == 2 and replace(divided, half=False).as_computed.weights_bytes == 4
