"""The parts of an export; whole ones: tests/exporting/test_command.py."""

import errno
import os
import shutil

import pytest
import torch
from full_disk import files_end_at
from tiny_checkpoints import save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.checkpoints.merge_lora import MergeProof
from cpt.checkpoints.proof import Difference, logits_of, proof_text
from cpt.checkpoints.proven_export import (
    Wish,
    config_of,
    describe_merge,
    is_plain,
    name_of,
    refuse_odd_wishes,
    reloaded,
    write_pth,
    written_whole_or_not,
)
from cpt.errors import CheckpointError, RecipeError


@pytest.mark.parametrize("size", ["5GB", "500MB", "50KB", "100B", "1GiB"])
def test_sizes_as_one_writes_them(size, tmp_path):
    refuse_odd_wishes(tmp_path / "new", size, None, adapter_only=False)


@pytest.mark.parametrize("size", ["huge", "0GB", "5", "GB", "-1GB", ""])
def test_what_is_no_size_is_refused(size, tmp_path):
    with pytest.raises(RecipeError, match="is no size. Write 5GB or 500MB"):
        refuse_odd_wishes(tmp_path / "new", size, None, adapter_only=False)


def test_an_empty_folder_may_be_the_output_and_a_file_not(tmp_path):
    (tmp_path / "empty").mkdir()
    refuse_odd_wishes(tmp_path / "empty", "5GB", None, adapter_only=False)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is not empty"):
        refuse_odd_wishes(tmp_path / "file", "5GB", None, adapter_only=False)


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(OSError, match="full"), written_whole_or_not(tmp_path / "out") as unfinished:
        unfinished.mkdir()
        (unfinished / "half").touch()
        assert not (tmp_path / "out").exists()
        raise OSError("full")
    assert list(tmp_path.iterdir()) == []
    with written_whole_or_not(tmp_path / "out") as unfinished:
        unfinished.mkdir()
        (unfinished / "all").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "all"]


def test_what_a_killed_export_left_does_not_come_along(tmp_path):
    left = tmp_path / ".out.unfinished"
    left.mkdir()
    (left / "of_before").touch()
    with written_whole_or_not(tmp_path / "out") as unfinished:
        unfinished.mkdir()
    assert list((tmp_path / "out").iterdir()) == []


def test_weights_that_say_something_else_when_loaded_back_are_refused(tokenizer_folder, tmp_path):
    folder = save_llama(tmp_path / "model", tokenizer_folder, seed=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    text, wish = proof_text(AutoTokenizer.from_pretrained(folder), model.config), Wish(dtype=torch.float32)
    expected = logits_of(model, text)
    assert "in a process without cpt: largest difference of logits 0 " in reloaded(folder, text, expected, wish)
    other = save_llama(tmp_path / "other", tokenizer_folder, seed=2)
    shutil.copy(other / "model.safetensors", folder)
    with pytest.raises(CheckpointError, match="The export loaded back by plain transformers says something else"):
        reloaded(folder, text, expected, wish)


def test_rounding_that_eats_the_adapter_is_told():
    none, small, large = Difference(0.0, 5.0, 0.1), Difference(0.01, 5.0, 0.1), Difference(0.05, 5.0, 0.1)
    lines = list(
        describe_merge(MergeProof(effect=small, merged=none, exported=large, changed=3, tensors=4), torch.bfloat16)
    )
    assert "(3 of 4 tensors)" in lines[0] and lines[-1].startswith(
        "warning: rounding to bfloat16 changes more than the adapter did"
    )
    assert (
        len(
            list(
                describe_merge(
                    MergeProof(effect=large, merged=none, exported=small, changed=3, tensors=4), torch.float32
                )
            )
        )
        == 2
    )


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="has no config.json"):
        config_of(tmp_path)


def test_a_base_whose_vocabulary_grew_is_not_the_plain_one(tokenizer_folder, tmp_path):
    folder = save_llama(tmp_path / "model", tokenizer_folder, seed=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert is_plain(str(folder), model) and not is_plain(None, model)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    assert not is_plain(str(folder), model)


def test_names_of_types_are_torch_s_own():
    assert name_of(torch.bfloat16) == "bfloat16"


def test_a_disk_that_takes_no_more_is_told_and_nothing_is_left(tmp_path):
    told = "out could not be written: No space left on device. Make room"
    with pytest.raises(CheckpointError, match=told), written_whole_or_not(tmp_path / "out"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_nothing_can_be_written_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"--output .*inside: .*file is a file. Choose another place"):
        refuse_odd_wishes(tmp_path / "file" / "inside", "5GB", None, adapter_only=False)
    with pytest.raises(CheckpointError, match=r"--pth .*model.pth: .*file is a file"):
        refuse_odd_wishes(tmp_path / "out", "5GB", tmp_path / "file" / "model.pth", adapter_only=False)
    with pytest.raises(RecipeError, match="Put it beside the folder"):
        refuse_odd_wishes(tmp_path / "out", "5GB", tmp_path / "out" / "model.pth", adapter_only=False)


@pytest.mark.parametrize("room", [1000, None])
def test_a_pth_file_appears_whole_or_not_at_all(tokenizer_folder, tmp_path, room):
    folder = save_llama(tmp_path / "model", tokenizer_folder, seed=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    text = proof_text(AutoTokenizer.from_pretrained(folder), model.config)
    wish = Wish(dtype=torch.float32, pth=tmp_path / "pth" / "model.pth")
    wrong = logits_of(model, text) + (0 if room else 1)
    with pytest.raises(CheckpointError, match="could not be written|says something else"), files_end_at(room or 10**9):
        write_pth(folder, text, wrong, wish)
    assert list((tmp_path / "pth").iterdir()) == []
