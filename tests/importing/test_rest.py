from imported_configs import result


def test_unknown_keys_are_told_with_what_was_meant(axolotl, llamafactory):
    assert "Did you mean `micro_batch_size`?" in result(axolotl(micro_batch_sice=2))["micro_batch_sice"][1]
    told = result(llamafactory(learning_rat=1e-5, stage="sft"))["learning_rat"]
    assert told[0] == "not" and "Did you mean `learning_rate`?" in told[1]


def test_what_is_off_there_is_off_here(axolotl):
    found = result(axolotl(load_in_8bit=False, tokens=[], relora=None, relora_prune_ratio=0.5, strict=True))
    assert found["load_in_8bit"] == ("carried", "off there, as here") == found["tokens"]
    assert found["relora"] == ("carried", "empty there") and found["relora_prune_ratio"][0] == "not"
    assert found["strict"][0] == "otherwise"


def test_keys_of_the_trainer_are_keys_of_llamafactory(llamafactory):
    ledger = llamafactory(logging_steps=7, full_determinism=True, fp16_backend="amp")
    assert ledger.recipe["training"]["logging_steps"] == 7 and ledger.recipe["training"]["full_determinism"] is True
    assert result(ledger)["fp16_backend"] == ("otherwise", "gone from transformers: write `fp16` or `bf16`")
