"""The parts of an export; whole ones: test_command.py."""

import errno
import os
import shutil

import pytest
import torch
from tiny_checkpoints import save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.errors import CheckpointError
from cpt.export.export import new_folder
from cpt.export.proof import logits_of, proof_text, reload_and_compare
from cpt.export.trained import saved_config
from cpt.export.write import is_plain


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(OSError, match="full"), new_folder(tmp_path / "out") as unfinished:
        unfinished.mkdir()
        (unfinished / "half").touch()
        assert not (tmp_path / "out").exists()
        raise OSError("full")
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "out") as unfinished:
        unfinished.mkdir()
        (unfinished / "all").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "all"]


def test_weights_that_say_something_else_when_loaded_back_are_refused(tokenizer_folder, tmp_path):
    folder = save_llama(tmp_path / "model", tokenizer_folder, seed=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    text = proof_text(AutoTokenizer.from_pretrained(folder), model.config)
    expected = logits_of(model, text.ids)
    report = reload_and_compare(folder, text, expected, torch.float32)
    assert "in a process without cpt: largest difference of logits 0 " in report
    other = save_llama(tmp_path / "other", tokenizer_folder, seed=2)
    shutil.copy(other / "model.safetensors", folder)
    with pytest.raises(CheckpointError, match="other logits when plain transformers loads it"):
        reload_and_compare(folder, text, expected, torch.float32)


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="has no config.json"):
        saved_config(tmp_path)


def test_a_base_whose_vocabulary_grew_is_not_the_plain_one(tokenizer_folder, tmp_path):
    folder = save_llama(tmp_path / "model", tokenizer_folder, seed=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert is_plain(str(folder), model) and not is_plain(None, model)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    assert not is_plain(str(folder), model)


def test_a_disk_that_takes_no_more_is_told_and_nothing_is_left(tmp_path):
    told = "out could not be written: No space left on device. Make room"
    with pytest.raises(CheckpointError, match=told), new_folder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []
