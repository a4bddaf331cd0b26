import json
import shutil

import pytest
from tiny_checkpoints import save_adapter
from tiny_models import make_tokenizer
from transformers import AutoTokenizer

from cpt.errors import CheckpointError
from cpt.export.proof import adapter_warnings, check_vocabulary, model_warnings


def test_tokens_without_a_row_are_refused():
    assert "padding" not in check_vocabulary(96, make_tokenizer())
    assert "32 rows are padding" in check_vocabulary(128, make_tokenizer())
    with pytest.raises(CheckpointError, match="96 tokens.*64 rows"):
        check_vocabulary(64, make_tokenizer())


def test_another_end_of_generation_is_a_warning(base_folder, tmp_path):
    folder = shutil.copytree(base_folder, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert not any("warning" in line for line in model_warnings(folder, tokenizer))
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": 99}))
    assert "eos_token_id" in model_warnings(folder, tokenizer)[0]


def test_what_vllm_refuses_of_an_adapter_is_a_warning(base_folder, adapter_folder, tmp_path):
    assert adapter_warnings(adapter_folder) == []
    whole = save_adapter(tmp_path / "whole", base_folder, modules_to_save=["embed_tokens"], r=32)
    head = save_adapter(tmp_path / "head", base_folder, target_modules=["q_proj", "lm_head"])
    assert "whole layers" in adapter_warnings(whole)[0] and "--max-lora-rank 32" in adapter_warnings(whole)[1]
    assert "embeddings or a head" in adapter_warnings(head)[0]
