import json

import pytest

from cpt.planner.setup import setup_of, zero_of
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
