import pytest
from imported_configs import CONFIGS, result

from cpt.importing.axolotl_keys import KNOWN, NOT
from cpt.importing.command import Tool, imported
from cpt.recipe.schema import Profile, Rope

EXAMPLES = sorted((CONFIGS / "axolotl").iterdir())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_becomes_a_recipe_that_loads(path, loaded):
    ledger = imported(path, Tool.AXOLOTL)
    assert loaded(ledger).model.path.startswith("example/")
    keys = [entry.key for entry in ledger.entries]
    assert len(keys) == len(set(keys)) and {key.partition("[")[0].partition(".")[0] for key in keys} == set(
        ledger.config.values
    )


def test_every_known_key_is_entered_once(axolotl, loaded):
    ledger = axolotl(**dict.fromkeys(NOT, True), **dict.fromkeys(KNOWN - NOT.keys() - {"base_model", "datasets"}))
    assert sorted(entry.key for entry in ledger.entries if not entry.key.startswith("datasets[")) == sorted(
        KNOWN - {"datasets"}
    )
    assert all(entry.told for entry in ledger.entries)
    loaded(ledger)


@pytest.mark.parametrize(
    ("values", "stage", "loss"),
    [
        ({"rl": "dpo"}, "dpo", None),
        ({"rl": "ipo"}, "dpo", ["ipo"]),
        ({"rl": "simpo", "cpo_alpha": 1.0, "simpo_gamma": 0.5}, "cpo", "simpo"),
        ({"rl": "orpo", "orpo_alpha": 0.2}, "orpo", None),
        ({"rl": "kto"}, "kto", None),
        ({"reward_model": True, "center_rewards_coefficient": 0.01}, "reward", None),
        ({"random_init_weights": True}, "pretrain", None),
    ],
)
def test_stages(axolotl, loaded, values, stage, loss):
    recipe = loaded(axolotl(**values))
    assert recipe.stage == stage and recipe.training.get("loss_type") == loss


def test_a_stage_that_there_is_not(axolotl):
    assert "there is no stage for `ebft`" in result(axolotl(rl="ebft"))["rl"][1]


def test_gdpo_is_grpo_with_another_sum_of_rewards(axolotl, loaded):
    recipe = loaded(axolotl(rl="gdpo"))
    assert recipe.stage == "grpo" and recipe.training["multi_objective_aggregation"] == "normalize_then_sum"


def test_a_reward_model_has_one_output(axolotl):
    assert result(axolotl(reward_model=True, num_labels=1))["num_labels"][0] == "carried"
    assert result(axolotl(reward_model=True, num_labels=2))["num_labels"][0] == "not"
    assert result(axolotl(rl="grpo", reward_model=True))["reward_model"] == ("carried", "rl decides there too")


def test_inputs_are_learned_too_where_all_are_conversations(axolotl, loaded):
    chats = [{"path": "a/b", "type": "chat_template"}]
    ledger = axolotl(datasets=chats, train_on_inputs=True)
    assert loaded(ledger).stage == "cpt" and loaded(ledger).data.sources[0].chat == "messages"
    assert (
        result(axolotl(datasets=[{"path": "a/b", "type": "alpaca"}], train_on_inputs=True))["train_on_inputs"][0]
        == "not"
    )
    assert loaded(axolotl(datasets=chats)).stage == "sft"


def test_adapters(axolotl, loaded):
    lora = loaded(
        axolotl(adapter="qlora", load_in_4bit=True, lora_r=8, lora_target_linear=True, lora_target_modules=["q_proj"])
    ).model.lora
    assert lora == {"r": 8, "target_modules": "all-linear", "quantize": "nf4", "double_quantize": True}
    kwargs = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}
    assert loaded(axolotl(adapter="qlora", bnb_config_kwargs=kwargs)).model.lora == {
        "quantize": "fp4",
        "double_quantize": False,
    }
    assert result(axolotl(adapter="llama-adapter", lora_r=8))["lora_r"] == (
        "otherwise",
        "no effect there: no adapter is trained",
    )


def test_rows(axolotl, loaded):
    assert loaded(axolotl(sample_packing=True)).data.packing == "best_fit" and loaded(axolotl()).data.packing == "none"
    pretraining = {"datasets": None, "pretraining_dataset": "example/web"}
    assert loaded(axolotl(**pretraining)).data.packing == "concatenate"
    assert loaded(axolotl(**pretraining, sample_packing=True)).data.packing == "best_fit"
    assert loaded(axolotl(dataset_exact_deduplication=True)).data.deduplicate == "exact"


def test_rope_and_rates_of_embeddings(axolotl, loaded):
    overrides = {"rope_theta": 500000, "rope_scaling": {"rope_type": "yarn", "factor": 2}, "sliding_window": 9}
    ledger = axolotl(overrides_of_model_config=overrides, embedding_lr_scale=0.1, learning_rate=1e-4)
    recipe = loaded(ledger)
    assert recipe.model.rope == Rope(theta=500000.0, type="yarn", factor=2.0)
    assert recipe.optimizer.options["embedding_learning_rate"] == pytest.approx(1e-5)
    assert result(ledger)["overrides_of_model_config.sliding_window"][0] == "not"
    assert result(axolotl(embedding_lr=1e-5, embedding_lr_scale=0.1))["embedding_lr_scale"] == (
        "otherwise",
        "embedding_lr decides",
    )


def test_recomputing_and_profile(axolotl, loaded):
    ledger = axolotl(
        gradient_checkpointing="offload", gradient_checkpointing_kwargs={"use_reentrant": False}, profiler_steps=3
    )
    recipe = loaded(ledger)
    assert recipe.training["gradient_checkpointing"] is True
    assert recipe.training["gradient_checkpointing_kwargs"] == {"use_reentrant": False, "offload": True}
    assert (
        recipe.monitoring.profile == Profile(at_step=1, steps=3)
        and result(ledger)["gradient_checkpointing"][0] == "otherwise"
    )


def test_activations_are_offloaded(axolotl, llamafactory, loaded):
    offload = {"offload": True}
    assert loaded(axolotl(activation_offloading="legacy")).training["gradient_checkpointing_kwargs"] == offload
    assert loaded(llamafactory(use_unsloth_gc=True)).training["gradient_checkpointing_kwargs"] == offload
    assert result(axolotl(activation_offloading=False))["activation_offloading"][0] == "carried"
