import json
import shutil

import pytest
from tiny_checkpoints import save_adapter
from tiny_models import make_tokenizer
from transformers import AutoTokenizer

from cpt.checkpoints.servable import adapter_file, check_vocabulary, describe_adapter, describe_for_servers
from cpt.errors import CheckpointError


def test_rows_that_pad_are_told_and_tokens_without_a_row_refused():
    assert "a row of embeddings for each" in check_vocabulary(96, make_tokenizer())
    assert "the last 32 are padding" in check_vocabulary(128, make_tokenizer())
    with pytest.raises(CheckpointError, match="96 tokens, the model 64 rows"):
        check_vocabulary(64, make_tokenizer())


def test_what_servers_read_is_told(base_folder):
    lines = describe_for_servers(base_folder, AutoTokenizer.from_pretrained(base_folder))
    assert (
        lines[0] == "Head: its own matrix."
        and lines[1].startswith("Generation ends at")
        and not any("warning" in line for line in lines)
    )


def test_a_missing_chat_template_and_another_end_are_told(base_folder, tmp_path):
    folder = shutil.copytree(base_folder, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": 99}))
    lines = describe_for_servers(folder, tokenizer)
    assert any("completions only" in line for line in lines) and any("a server may not stop" in line for line in lines)


def test_adapters_that_servers_refuse_are_told(base_folder, adapter_folder, tmp_path):
    assert describe_adapter(adapter_folder) == []
    whole = save_adapter(tmp_path / "whole", base_folder, modules_to_save=["embed_tokens"], r=32)
    head = save_adapter(tmp_path / "head", base_folder, target_modules=["q_proj", "lm_head"])
    assert (
        "whole layers (embed_tokens): vLLM refuses" in describe_adapter(whole)[0]
        and "--max-lora-rank 32" in describe_adapter(whole)[1]
    )
    assert "embeddings or head (lm_head)" in describe_adapter(head)[0]


def test_an_adapter_without_weights_is_incomplete(adapter_folder, tmp_path):
    shutil.copy(adapter_folder / "adapter_config.json", tmp_path)
    with pytest.raises(CheckpointError, match="adapter_model.safetensors"):
        adapter_file(tmp_path)
