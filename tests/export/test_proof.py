"""What proves an export: its logits in another process, its vocabulary, and a seal of its files."""

import json
import shutil

import pytest
import torch
from tiny_checkpoints import save_llama
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from cpt.errors import CheckpointError, DataError
from cpt.export.proof import (
    NUM_TOKENS,
    brings_its_code,
    check_seal,
    difference,
    logits_in_another_process,
    logits_of,
    model_warnings,
    proof_text,
    reload_and_compare,
    write_seal,
)


@pytest.fixture(scope="session")
def tokenizer(base_folder):
    return AutoTokenizer.from_pretrained(base_folder)


def test_the_text_is_cut_to_what_the_model_takes(tokenizer, tmp_path):
    assert len(proof_text(tokenizer, LlamaConfig()).ids) == NUM_TOKENS
    assert len(proof_text(tokenizer, GPT2Config(n_positions=64)).ids) == 64
    (tmp_path / "mine.txt").write_text("the model reads")
    assert (
        tokenizer.decode(proof_text(tokenizer, LlamaConfig(), tmp_path / "mine.txt").ids)
        == "the model reads"
    )


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe"])
def test_a_text_that_cannot_be_used_is_refused(tokenizer, tmp_path, content):
    if content is not None:
        (tmp_path / "mine.txt").write_bytes(content)
    with pytest.raises(DataError, match="mine.txt"):
        proof_text(tokenizer, LlamaConfig(), tmp_path / "mine.txt")


def test_a_difference_is_allowed_by_the_dtype_or_by_the_users_own_tolerance():
    one = torch.tensor([[10.0, 0.0]])
    other = one + torch.tensor([[0.0, 0.1]])
    assert (
        difference(one, other, torch.bfloat16).is_allowed
        and not difference(one, other, torch.float32).is_allowed
    )
    assert difference(one, other, torch.float32, tolerance=0.02).is_allowed
    assert not difference(one, one * torch.nan, torch.bfloat16).is_allowed


@pytest.mark.slow
def test_weights_that_changed_on_the_way_are_refused(
    base_folder, tokenizer, tokenizer_folder, tmp_path
):
    text = proof_text(tokenizer, LlamaConfig())
    expected = logits_of(AutoModelForCausalLM.from_pretrained(base_folder), text.ids)
    other = save_llama(tmp_path / "other", tokenizer_folder, seed=2)
    with pytest.raises(CheckpointError, match="different logits"):
        reload_and_compare(other, text, expected, torch.float32)


@pytest.mark.slow
def test_a_reward_model_is_proven_by_its_score(base_folder, tokenizer, tmp_path):
    folder = shutil.copytree(base_folder, tmp_path / "reward")
    config = LlamaConfig.from_pretrained(folder, num_labels=1, pad_token_id=0)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    assert logits_in_another_process(
        folder, proof_text(tokenizer, config), torch.float32
    ).shape == (1,)


OWN_CODE = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}


@pytest.mark.parametrize(
    ("auto_map", "is_trusted"),
    [
        ({}, False),
        (OWN_CODE, True),
        (OWN_CODE | {"AutoModelForCausalLM": "someone/repository--mine.Model"}, False),
    ],
)
def test_code_is_trusted_only_if_all_of_it_is_in_the_folder(tmp_path, auto_map, is_trusted):
    assert not brings_its_code(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    assert not brings_its_code(tmp_path)
    (tmp_path / "mine.py").touch()
    assert brings_its_code(tmp_path) == is_trusted


# --- what servers do with it -----------------------------------------------------------------------------------------


def test_another_end_of_generation_is_a_warning(base_folder, tokenizer, tmp_path):
    folder = shutil.copytree(base_folder, tmp_path / "model")
    assert not any("warning" in line for line in model_warnings(folder, tokenizer))
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": 99}))
    assert "eos_token_id" in model_warnings(folder, tokenizer)[0]


# --- the seal --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sealed(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "README.md").write_text("# card")
    write_seal(tmp_path, ["The export loaded back: difference 0.", "Serve it: cpt serve"])
    return tmp_path


def test_a_proven_export_may_have_its_card_edited(sealed):
    (sealed / "README.md").write_text("# a better card")
    assert check_seal(sealed) == sealed
    assert json.loads((sealed / "export.json").read_text())["proof"] == [
        "The export loaded back: difference 0."
    ]


@pytest.mark.parametrize("changed", ["model.safetensors", "notes.txt"])
def test_files_that_changed_or_were_added_after_the_proof_are_named(sealed, changed):
    (sealed / changed).write_bytes(b"other")
    with pytest.raises(CheckpointError, match=changed):
        check_seal(sealed)
