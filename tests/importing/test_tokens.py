from imported_configs import result

CHATS = [{"path": "a/b", "type": "chat_template"}]


def test_special_tokens_are_the_tokenizers(axolotl):
    tokens = {"pad_token": "<pad>", "eos_token": "<end>", "bos_token": None, "additional_special_tokens": ["<a>"]}
    found = result(axolotl(special_tokens=tokens))
    assert found["special_tokens.pad_token"][0] == "otherwise" and found["special_tokens.bos_token"] == (
        "carried",
        "empty there",
    )
    assert "tokenizer_config.json" in found["special_tokens.eos_token"][1]
    assert "cpt tokenizer extend" in found["special_tokens.additional_special_tokens"][1]
    assert result(axolotl(special_tokens={}))["special_tokens"] == ("carried", "empty there")


def test_chats_are_written_by_the_tokenizers_template(axolotl):
    assert result(axolotl(chat_template="tokenizer_default", datasets=CHATS))["chat_template"] == (
        "carried",
        "the tokenizer's own template",
    )
    told = result(axolotl(chat_template="chatml", datasets=CHATS))["chat_template"]
    assert told[0] == "otherwise" and "where axolotl writes `chatml`" in told[1]
    assert "texts have no chat template" in result(axolotl(chat_template="chatml"))["chat_template"][1]
