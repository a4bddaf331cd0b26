import pytest
from imported_configs import result

from cpt.importing.model import targets


@pytest.mark.parametrize(
    ("values", "attention", "verdict"),
    [
        ({"flash_attention": True}, "auto", "otherwise"),
        ({"sdp_attention": True}, "sdpa", "carried"),
        ({"attn_implementation": "flex_attention"}, "flex_attention", "carried"),
        ({"attn_implementation": "kernels-community/flash-attn3"}, "auto", "otherwise"),
        ({"attn_implementation": "kernels-community/vllm-flash-attn3"}, "auto", "otherwise"),
        ({"attn_implementation": "sage"}, None, "not"),
    ],
)
def test_attention(axolotl, loaded, values, attention, verdict):
    ledger = axolotl(**values)
    assert ledger.recipe["model"].get("attention") == attention and result(ledger)[next(iter(values))][0] == verdict
    loaded(ledger)


def test_code_of_the_hub_is_pinned(axolotl, loaded):
    for key in ("revision_of_model", "model_revision"):
        assert loaded(axolotl(trust_remote_code=True, **{key: "a" * 40})).model.trust_remote_code
    assert result(axolotl(trust_remote_code=True, revision_of_model="a" * 41))["trust_remote_code"][0] == "not"
    assert result(axolotl(trust_remote_code=True))["trust_remote_code"][0] == "not"
    assert result(axolotl(trust_remote_code=False))["trust_remote_code"] == ("carried", "off there, as here")


@pytest.mark.parametrize(
    ("values", "training", "dtype"),
    [
        ({"bf16": "auto"}, {"bf16": True}, None),
        ({"bf16": "auto", "fp16": True}, {"fp16": True}, None),
        ({"bf16": True, "fp16": True}, {"bf16": True}, None),
        ({"bf16": "full"}, {"bf16": True}, "bfloat16"),
        ({"bf16": False, "tf32": True}, {"tf32": True}, None),
        ({"bfloat16": True, "bf16": True}, {"bf16": True}, "bfloat16"),
        ({"bf16": None}, {}, None),
    ],
)
def test_precision(axolotl, loaded, values, training, dtype):
    ledger = axolotl(**values)
    found = {key: value for key, value in ledger.recipe["training"].items() if key in ("bf16", "fp16", "tf32")}
    assert found == training and ledger.recipe["model"].get("dtype") == dtype
    loaded(ledger)


def test_names_of_layers():
    assert (
        targets("all") == "all-linear"
        and targets("q_proj, v_proj") == ["q_proj", "v_proj"]
        and targets(["a"]) == ["a"]
    )
    assert targets(".*(q|v)_proj") == ".*(q|v)_proj"


def test_liger_where_the_stage_can_use_it(axolotl, llamafactory):
    training = axolotl(liger_rope=True, liger_glu_activation=True, liger_rms_norm=False, liger_layer_norm=True).recipe[
        "training"
    ]
    assert training["use_liger_kernel"] is True and training["liger_kernel_config"] == {"rope": True, "swiglu": True}
    ledger = llamafactory(stage="dpo", enable_liger_kernel=True)
    assert (
        "use_liger_kernel" not in ledger.recipe["training"] and result(ledger)["enable_liger_kernel"][0] == "otherwise"
    )


def test_options_that_peft_does_not_take_are_told(axolotl, loaded):
    ledger = axolotl(adapter="lora", lora_r="16", peft_use_dora="perhaps", lora_modules_to_save=3)
    assert loaded(ledger).model.lora == {"r": 16}
    assert result(ledger)["peft_use_dora"] == ("not", "`model.lora.use_dora` must be true or false")


def test_new_weights_have_no_adapter(axolotl, loaded):
    ledger = axolotl(adapter="lora", lora_r=8, random_init_weights=True)
    assert (
        loaded(ledger).model.lora is None
        and loaded(ledger).stage == "pretrain"
        and result(ledger)["adapter"][0] == "not"
    )
