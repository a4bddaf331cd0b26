import pytest
from imported_configs import CONFIGS, result

from cpt.importing.command import Tool, imported
from cpt.importing.llamafactory import trainer_keys
from cpt.importing.llamafactory_keys import KNOWN, NOT

EXAMPLES = sorted((CONFIGS / "llamafactory").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_becomes_a_recipe_that_loads(path, loaded):
    ledger = imported(path, Tool.LLAMAFACTORY)
    assert loaded(ledger).model.path.startswith("example/")
    keys = [entry.key for entry in ledger.entries if not entry.key.startswith("dataset_info.json")]
    assert len(keys) == len(set(keys)) and {key.partition(".")[0] for key in keys} == set(ledger.config.values)


def test_every_known_key_is_entered_once(llamafactory, loaded):
    given = {"model_name_or_path", "stage", "dataset", "dataset_dir"}
    ledger = llamafactory(**dict.fromkeys(NOT, True), **dict.fromkeys((KNOWN | trainer_keys()) - NOT.keys() - given))
    assert sorted(entry.key for entry in ledger.entries) == sorted(KNOWN | trainer_keys())
    assert all(entry.told for entry in ledger.entries)
    loaded(ledger)


@pytest.mark.parametrize(
    ("values", "stage", "loss"),
    [
        ({"stage": "pt"}, "cpt", None),
        ({"stage": "pt", "train_from_scratch": True, "finetuning_type": "full"}, "pretrain", None),
        ({"stage": "sft"}, "sft", None),
        ({"stage": "sft", "train_on_prompt": True}, "cpt", None),
        ({"stage": "rm"}, "reward", None),
        ({"stage": "dpo"}, "dpo", None),
        ({"stage": "dpo", "pref_loss": "ipo"}, "dpo", ["ipo"]),
        ({"stage": "dpo", "pref_loss": "orpo"}, "orpo", None),
        ({"stage": "dpo", "pref_loss": "simpo", "simpo_gamma": 0.3}, "cpo", "simpo"),
        ({"stage": "kto"}, "kto", None),
        ({"stage": "ppo", "reward_model": "saves/rm"}, "ppo", None),
    ],
)
def test_stages(llamafactory, loaded, values, stage, loss):
    recipe = loaded(llamafactory(**values))
    found = recipe.training.get("loss_type")
    assert recipe.stage == stage and (found == loss or found == ["sigmoid"] and loss is None)


def test_stages_that_there_are_not(llamafactory):
    assert result(llamafactory(stage="distill"))["stage"][0] == "not"
    assert result(llamafactory(stage="dpo", pref_loss="kto_pair"))["pref_loss"][0] == "not"
    assert result(llamafactory(do_train=False))["do_train"][0] == "not"


@pytest.mark.parametrize(
    ("values", "lora"),
    [
        ({}, {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}),
        (
            {"lora_rank": 4, "lora_target": "q_proj,v_proj"},
            {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        ),
        (
            {"additional_target": "embed_tokens"},
            {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "modules_to_save": ["embed_tokens"]},
        ),
        (
            {"pissa_init": True},
            {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": "pissa_niter_16"},
        ),
        ({"finetuning_type": "oft", "oft_block_size": 32}, {"method": "oft", "oft_block_size": 32}),
        (
            {"finetuning_type": "oft", "oft_block_size": 32, "quantization_bit": 4},
            {"method": "oft", "oft_block_size": 32},
        ),
        ({"finetuning_type": "full", "lora_rank": 4}, None),
        (
            {"quantization_bit": 4, "double_quantization": False},
            {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "quantize": "nf4", "double_quantize": False},
        ),
    ],
)
def test_adapters(llamafactory, loaded, values, lora):
    assert loaded(llamafactory(**values)).model.lora == lora


def test_what_is_not_trained_here(llamafactory):
    assert "some layers alone" in result(llamafactory(finetuning_type="freeze"))["finetuning_type"][1]
    assert "is nothing that LLaMA-Factory knows" in result(llamafactory(finetuning_type="qlora"))["finetuning_type"][1]
    found = result(llamafactory(quantization_bit=8, quantization_type="nf4"))
    assert found["quantization_bit"][0] == "not" and found["quantization_type"][0] == "otherwise"
    assert result(llamafactory(rope_scaling="linear"))["rope_scaling"][0] == "not"


@pytest.mark.parametrize(
    ("values", "packing"),
    [
        ({"stage": "pt"}, "concatenate"),
        ({"stage": "pt", "packing": False}, "none"),
        ({"stage": "sft", "packing": True}, "best_fit"),
        ({"stage": "sft", "neat_packing": True}, "best_fit"),
        ({"stage": "sft"}, "none"),
    ],
)
def test_rows(llamafactory, loaded, values, packing):
    assert loaded(llamafactory(**values)).data.packing == packing


def test_recomputing_is_on_by_default(llamafactory):
    assert llamafactory().recipe["training"]["gradient_checkpointing"] is True
    assert llamafactory(disable_gradient_checkpointing=True).recipe["training"]["gradient_checkpointing"] is False
    assert llamafactory(use_reentrant_gc=False).recipe["training"]["gradient_checkpointing_kwargs"] == {
        "use_reentrant": False
    }
