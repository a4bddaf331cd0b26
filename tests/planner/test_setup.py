import json
from dataclasses import replace

import pytest
from planned_setups import PLAIN
from transformers import AutoConfig

from cpt.planner.setup import Zero, attention_on_gpu, fsdp_of, setup_of, zero_of
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


def setup(gpus=1, profile=None, on_cpu=False, **written):
    return setup_of(recipe(**written), gpus, profile, attention="sdpa", on_cpu=on_cpu)


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


def test_the_global_batch_decides_the_accumulation():
    written = {"budget": {"global_batch_tokens": 65_536}, "per_device_train_batch_size": 2}
    assert setup(4, **written).accumulation == 8 and setup(8, **written).tokens_per_step == 65_536


@pytest.mark.parametrize(
    ("file", "stage", "on_host"),
    [
        ("zero1", 1, (False, False)),
        ("prototype", 2, (True, False)),
        ("production", 3, (False, False)),
        ("8b_24gb", 3, (True, True)),
    ],
)
def test_the_shipped_profiles_are_read(file, stage, on_host):
    zero = zero_of(json.loads((PROFILES / f"ds_config_{file}.json").read_text()))
    assert zero is not None and zero.stage == stage and (zero.offload_optimizer, zero.offload_parameters) == on_host


def test_what_a_profile_leaves_out_is_as_deepspeed_has_it():
    zero = zero_of({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}})
    assert zero is not None and (zero.reduce_bucket, zero.sub_group) == (500_000_000, 1_000_000_000)
    assert zero.overlap_comm and zero_of({"zero_optimization": {"stage": 0}}) is None


def test_fsdp_divides_as_zero3_does_with_weights_as_layers_see_them():
    kept = fsdp_of({"fsdp": "full_shard", "fsdp_config": {"fsdp_reshard_after_forward": False}})
    assert kept is not None and kept.stage == 3 and kept.keeps_gathered and fsdp_of({"bf16": True}) is None
    synced = {"fsdp": True, "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    assert fsdp_of(synced).reduces_each_micro_batch
    divided = replace(PLAIN, weights_bytes=4, zero=Zero(3, is_fsdp=True))
    assert divided.as_computed.weights_bytes == 2 and replace(divided, half=False).as_computed.weights_bytes == 4


def test_what_is_not_counted_is_named():
    sizes = [{}, {"parallelism_config": {"sp_size": 2}}, {"parallelism_config": {"tp_size": 2}}]
    found = [setup(4, per_device_train_batch_size=1, **written).beside.uncounted for written in sizes]
    assert found[0] == () and "share a row" in found[1][0] and "tensor and context" in found[2][0]
    hpz = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}
    assert "zero_hpz_partition_size" in setup(8, hpz).beside.uncounted[0]


def test_a_process_that_shares_rows_has_a_part_of_each():
    assert setup(8, parallelism_config={"sp_size": 4}).sequence_length == setup(8).sequence_length // 4
