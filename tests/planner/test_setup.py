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


def test_weights_are_fp32_unless_something_else_keeps_masters():
    assert setup_of(recipe(), 1, None, attention="sdpa").weights_bytes == 4
    assert setup_of(recipe(bf16=True), 1, None, attention="sdpa").weights_bytes == 2
    assert setup_of(recipe(bf16=True), 1, None, attention="sdpa", on_cpu=True).weights_bytes == 4
    assert setup_of(recipe(bf16=True, fsdp=True), 1, None, attention="sdpa").weights_bytes == 4
    assert setup_of(recipe(bf16=True, model={"dtype": "float32"}), 1, None, attention="sdpa").weights_bytes == 4
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
    given = recipe(
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"selective": True, "every_n_layers": 3, "offload": True},
    )
    setup = setup_of(given, 1, None, attention="sdpa")
    assert (
        setup.checkpointing
        and setup.recomputing.selective
        and setup.recomputing.every_n_layers == 3
        and setup.recomputing.offload
    )


def test_the_global_batch_decides_the_accumulation():
    given = recipe(budget={"global_batch_tokens": 65_536}, per_device_train_batch_size=2)
    assert setup_of(given, 4, None, attention="sdpa").accumulation == 8
    assert setup_of(given, 8, None, attention="sdpa").tokens_per_step == 65_536


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
    assert (
        zero is not None
        and zero.reduce_bucket == 500_000_000
        and zero.sub_group == 1_000_000_000
        and zero.overlap_comm
    )
    assert zero_of({"zero_optimization": {"stage": 0}}) is None and zero_of({}) is None


def test_fsdp_divides_as_zero3_does_with_weights_in_fp32():
    fsdp = fsdp_of({"fsdp": True, "bf16": True})
    assert fsdp is not None and fsdp.is_fsdp and fsdp.stage == 3 and not fsdp.keeps_gathered
    kept = fsdp_of({"fsdp": "full_shard", "fsdp_config": {"fsdp_reshard_after_forward": False}})
    assert kept is not None and kept.keeps_gathered
    assert fsdp_of({"bf16": True}) is None


def test_weights_of_fsdp_are_counted_as_layers_see_them():
    setup = replace(PLAIN, weights_bytes=4, zero=Zero(3, is_fsdp=True))
    assert setup.as_computed.weights_bytes == 2 and replace(setup, half=False).as_computed.weights_bytes == 4
    assert replace(setup, zero=None).as_computed.weights_bytes == 4


def test_a_profile_may_have_a_second_copy_and_quantized_tensors():
    section = {
        "stage": 3,
        "zero_hpz_partition_size": 8,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    }
    zero = zero_of({"zero_optimization": section})
    assert zero is not None and (zero.secondary, zero.quantized_weights, zero.quantized_gradients) == (8, True, True)
    other = zero_of({"zero_optimization": section | {"stage": 2}})
    assert other is not None and (other.secondary, other.quantized_weights) == (1, False)


def test_what_sharing_rows_sends_is_told_as_left_out():
    def uncounted(**sizes):
        training = {"parallelism_config": sizes} if sizes else {}
        return setup_of(recipe(per_device_train_batch_size=1, **training), 4, None, attention="sdpa").beside.uncounted

    assert uncounted() == ()
    assert "share a row" in uncounted(sp_size=2)[0] and "tensor and context" in uncounted(tp_size=2)[0]


def test_a_recipe_with_fsdp_is_planned_so():
    setup = setup_of(recipe(fsdp=True, bf16=True), 4, None, attention="sdpa", nodes=2)
    assert setup.zero is not None and setup.zero.is_fsdp and setup.weights_bytes == 4 and setup.gpus_per_node == 2


def test_a_process_that_shares_rows_has_a_part_of_each():
    whole = setup_of(recipe(per_device_train_batch_size=2), 8, None, attention="varlen")
    shared = setup_of(
        recipe(per_device_train_batch_size=2, parallelism_config={"sp_size": 4}), 8, None, attention="varlen"
    )
    assert shared.sequence_length == whole.sequence_length // 4
