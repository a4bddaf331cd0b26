"""`reload.py` is a program of its own, run where this package cannot be imported."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tiny import TINY_LLAMA
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from cpt.checkpoints import reload

TEXT = "the model reads a document and learns"


@pytest.fixture
def job(tokenizer_folder, tmp_path):
    """A tiny model with its tokenizer in a folder, and what is to be done with it."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY_LLAMA, "vocab_size": len(tokenizer)}))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    content = {"folder": str(tmp_path / "model"), "text": TEXT, "tokens": 100, "ids": ids, "dtype": "float32"}
    return model, {
        **content,
        "adapter": False,
        "own_code": False,
        "pth": None,
        "base": None,
        "output": str(tmp_path / "logits.safetensors"),
    }


def run(job, tmp_path):
    (tmp_path / "job.json").write_text(json.dumps(job))
    return subprocess.run(
        [sys.executable, "-I", reload.__file__, str(tmp_path / "job.json")], capture_output=True, text=True
    )


@pytest.mark.long
def test_another_tokenizer_is_noticed(job, tmp_path):
    _, content = job
    ended = run({**content, "ids": [1, *content["ids"]]}, tmp_path)
    assert ended.returncode and "the exported tokenizer gives other tokens" in ended.stderr


@pytest.mark.slow
def test_a_reward_model_gives_its_score(job, tmp_path):
    _, content = job
    torch.manual_seed(0)
    LlamaForSequenceClassification(
        LlamaConfig(**{**TINY_LLAMA, "vocab_size": 4000, "num_labels": 1, "pad_token_id": 0})
    ).save_pretrained(content["folder"])
    ended = run(content, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert load_file(content["output"])["logits"].shape == (1,)
