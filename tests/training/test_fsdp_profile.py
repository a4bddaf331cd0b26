import json
import re

import pytest
from tiny import TINY_LLAMA, write_recipe

from cpt.errors import RecipeError
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe
from cpt.training.engine_profiles import check_fsdp, fsdp_config


@pytest.fixture
def complaints(tmp_path):
    """What is wrong with a recipe with these sections."""

    def of(config=None, **sections):
        training = {
            "fsdp": True,
            **({"fsdp_config": config} if config is not None else {}),
            **sections.pop("training", {}),
        }
        recipe = {
            "name": "x",
            "stage": "pretrain",
            "model": {"from_scratch": True, "config": TINY_LLAMA},
            "tokenizer": {"path": "x"},
            "data": {"sources": [{"path": "x"}]},
            "budget": {"tokens": 1000},
            "training": training,
        }
        return check_fsdp(load_recipe(write_recipe({**recipe, **sections}, tmp_path / "x.yaml")))

    return of


def test_what_is_tested_is_taken(complaints):
    assert complaints() == []
    assert complaints({"version": 2, "reshard_after_forward": False, "fsdp_auto_wrap_policy": "NO_WRAP"}) == []
    assert complaints({"cpu_offload": True}, training={"bf16": True}) == []
    assert complaints(training={"fsdp": False}) == []
    assert (
        complaints(
            model={"path": "x", "lora": {"r": 4}}, stage="cpt", training={"bf16": True, "gradient_checkpointing": True}
        )
        == []
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"version": 1}, "only FSDP2"),
        ({"state_dict_type": "SHARDED_STATE_DICT"}, "each process's own part, whatever it says"),
        ({"activation_checkpointing": True}, "write `training.gradient_checkpointing: true`"),
        ({"use_orig_params": True}, "no key called `use_orig_params`"),
        ({"reshard_after_foward": True}, "no key called `reshard_after_foward`. Did you mean"),
        ({"reshard_after_forward": "full_shard"}, "is true .* or false"),
        ({"min_num_params": 10}, "auto_wrap_policy"),
    ],
)
def test_keys_that_do_nothing_here_are_refused(complaints, config, said):
    (complaint,) = complaints(config)
    assert re.search(said, complaint) and "`training.fsdp_config`" in complaint


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"optimizer": {"name": "muon", "learning_rate": 1e-3}}, "needs whole parameters"),
        ({"optimizer": {"name": "adamw_8bit", "learning_rate": 1e-3}}, "needs whole parameters"),
        ({"optimizer": {"learning_rate": 1e-3, "release_gradients": True}}, "release_gradients"),
        ({"training": {"fp16": True}}, "Write `bf16: true`"),
        ({"training": {"fsdp": "full_shard"}}, "is FSDP 1's"),
        ({"model": {"path": "x", "dtype": "bfloat16"}, "stage": "cpt"}, "keeps fp32 weights"),
        ({"model": {"path": "x", "lora": {"r": 4, "quantize": "nf4"}}, "stage": "cpt"}, "in 4 bit"),
        ({"stage": "grpo", "rewards": ["exact_match"]}, "Take a DeepSpeed profile"),
    ],
)
def test_what_does_not_go_together_is_refused_with_a_remedy(complaints, sections, said):
    (complaint,) = complaints(**sections)
    assert said in complaint


def test_a_config_without_fsdp_has_no_effect(complaints):
    (complaint,) = complaints({"version": 2}, training={"fsdp": False})
    assert "no effect without `training.fsdp: true`" in complaint


def test_the_config_may_be_a_file(tmp_path):
    (tmp_path / "fsdp.json").write_text(json.dumps({"fsdp_cpu_offload": True}))
    assert fsdp_config({"fsdp_config": str(tmp_path / "fsdp.json")}) == {"cpu_offload": True}
    with pytest.raises(RecipeError, match="nowhere.json"):
        fsdp_config({"fsdp_config": "nowhere.json"})
    with pytest.raises(RecipeError, match="is a mapping"):
        fsdp_config({"fsdp_config": [1]})


def planned(**training):
    """A recipe with these keys, which a plan is asked for."""
    return Recipe.model_validate(
        {
            "name": "x",
            "stage": "pretrain",
            "model": {"from_scratch": True, "config": TINY_LLAMA},
            "tokenizer": {"path": "x"},
            "data": {"sources": [{"path": "x"}]},
            "budget": {"tokens": 1000},
            "optimizer": {"name": "muon" if training.get("fsdp") == "shard" else "adamw", "learning_rate": 1e-3},
            "training": training,
        }
    )


def test_a_plan_is_refused_only_for_what_no_machine_trains():
    assert check_fsdp(planned(fsdp=True, fsdp_config={"cpu_offload": True}), here=False) == []
    assert check_fsdp(planned(fsdp_config={"version": 2}), here=False) == []
    one, other = check_fsdp(planned(fsdp="shard"), here=False)
    assert "is FSDP 1's" in one and "needs whole parameters" in other
