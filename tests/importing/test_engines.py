from pathlib import Path

import pytest
from imported_configs import result

from cpt.errors import RecipeError
from cpt.importing.engines import PROFILES, profile_for


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("zero1", "ds_config_zero1.json"),
        ("zero2", "ds_config_zero1.json"),
        ("ds_z2_offload_config", "ds_config_prototype.json"),
        ("zero3_bf16", "ds_config_production.json"),
        ("ds_z3_config", "ds_config_production.json"),
        ("zero3_bf16_cpuoffload_all", "ds_config_8b_24gb.json"),
        ("ds_z0_config", None),
        ("mine", None),
    ],
)
def test_profiles_by_what_their_names_say(name, profile):
    assert profile_for(name)[0] == profile
    assert profile is None or (Path(__file__).parents[2] / PROFILES / profile).is_file()


def test_a_deepspeed_file_that_is_here_is_taken(axolotl, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text("{}")
    assert axolotl(deepspeed=str(file)).recipe["training"]["deepspeed"] == str(file)
    assert axolotl(deepspeed={"zero_optimization": {"stage": 1}}).recipe["training"]["deepspeed"] == {
        "zero_optimization": {"stage": 1}
    }
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert axolotl(deepspeed=offload).recipe["training"]["deepspeed"] == {
        **offload,
        "zero_force_ds_cpu_optimizer": False,
    }
    ledger = axolotl(deepspeed="other.json")
    assert "deepspeed" not in ledger.recipe["training"] and result(ledger)["deepspeed"][0] == "not"
    assert result(axolotl(deepspeed=False))["deepspeed"] == ("carried", "off there, as here")


def test_fsdp_is_fsdp2(axolotl, loaded):
    config = {
        "fsdp_offload_params": True,
        "fsdp_activation_checkpointing": True,
        "fsdp_sharding_strategy": "FULL_SHARD",
        "state_dict_type": "FULL_STATE_DICT",
        "odd": 1,
        "x": None,
    }
    ledger = axolotl(fsdp=["full_shard", "auto_wrap"], fsdp_config=config, fsdp_version=1)
    assert loaded(ledger).training["fsdp_config"] == {"version": 2, "cpu_offload": True}
    assert ledger.recipe["training"]["gradient_checkpointing"] is True
    found = result(ledger)
    assert (
        found["fsdp_config.fsdp_sharding_strategy"][0] == found["fsdp_config.odd"][0] == "not"
        and "fsdp_config" not in found
    )
    assert axolotl(fsdp="full_shard offload").recipe["training"]["fsdp_config"]["cpu_offload"] is True
    ledger = axolotl(fsdp_config="mine.json")
    assert (
        ledger.recipe["training"]["fsdp_config"] == {"version": 2}
        and "are in mine.json" in result(ledger)["fsdp_config"][1]
    )
    with pytest.raises(RecipeError, match="`fsdp_config`: expected keys with values, or a JSON file, got 'x'"):
        axolotl(fsdp_config="x")
    off = result(axolotl(fsdp=[], fsdp_config={}))
    assert off["fsdp"] == off["fsdp_config"] == ("carried", "off there, as here")


def test_gpus_share_rows_under_zero(axolotl):
    ledger = axolotl(context_parallel_size=2, tensor_parallel_size=1, dp_shard_size=4, deepspeed="zero2.json")
    assert ledger.recipe["training"]["parallelism_config"] == {"sp_size": 2}
    assert (
        result(ledger)["tensor_parallel_size"] == ("carried", "one GPU there, as here")
        and result(ledger)["dp_shard_size"][0] == "not"
    )
    assert result(axolotl(context_parallel_size=2))["context_parallel_size"][0] == "not"
    ledger = axolotl(context_parallel_size=2, fsdp=["full_shard"])
    assert "fsdp" not in ledger.recipe["training"] and ledger.recipe["training"]["parallelism_config"] == {
        "sp_size": 2
    }
    assert (
        result(ledger)["fsdp"][0] == "otherwise"
        and ledger.recipe["training"]["deepspeed"] == PROFILES + "ds_config_production.json"
    )


QLORA = {"adapter": "qlora", "lora_r": 8}
FSDP = {"fsdp": ["full_shard"]}


@pytest.mark.parametrize(
    ("config", "optimizer", "engine"),
    [
        ({"optimizer": "adamw_8bit", "deepspeed": "zero1.json"}, "adamw", "deepspeed"),
        ({"optimizer": "paged_adamw_8bit", **FSDP}, "adamw", "fsdp"),
        ({"optimizer": "adamw_8bit"}, "adamw_8bit", None),
        ({"optimizer": "paged_adamw_8bit", **FSDP, **QLORA}, "paged_adamw_8bit", None),
        ({**QLORA, "deepspeed": "zero3.json"}, "adamw", None),
        ({**QLORA, "deepspeed": "zero2.json"}, "adamw", "deepspeed"),
        ({"optimizer": "muon", **FSDP}, "muon", None),
        ({"optimizer": "sgd", "deepspeed": "zero2_offload.json"}, "sgd", "deepspeed"),
    ],
)
def test_an_engine_does_not_change_what_is_learned(axolotl, config, optimizer, engine):
    recipe = axolotl(**config).recipe
    assert recipe["optimizer"]["name"] == optimizer
    assert {"deepspeed", "fsdp"} & recipe["training"].keys() == ({engine} if engine else set())
    assert bool(recipe["model"].get("lora", {}).get("quantize")) == ("adapter" in config)
