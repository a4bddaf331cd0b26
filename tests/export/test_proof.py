import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, LlamaForSequenceClassification

from cpt.errors import CheckpointError, DataError
from cpt.export.proof import (
    NUM_TOKENS,
    ProofText,
    brings_its_code,
    difference,
    logits_in_another_process,
    logits_of,
    proof_text,
)


def test_the_text_is_real_and_cut_to_a_number_of_tokens(base_folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    assert len(proof_text(tokenizer, LlamaConfig()).ids) == NUM_TOKENS
    assert len(proof_text(tokenizer, GPT2Config(n_positions=64)).ids) == 64  # more than the model takes would fail
    (tmp_path / "mine.txt").write_text("the model reads")
    assert tokenizer.decode(proof_text(tokenizer, LlamaConfig(), tmp_path / "mine.txt").ids) == "the model reads"


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe"])
def test_a_text_that_cannot_be_used_is_refused(base_folder, tmp_path, content):
    if content is not None:
        (tmp_path / "mine.txt").write_bytes(content)
    with pytest.raises(DataError, match="mine.txt"):
        proof_text(AutoTokenizer.from_pretrained(base_folder), LlamaConfig(), tmp_path / "mine.txt")


def test_a_difference_is_judged_by_the_dtype_or_by_the_users_own_tolerance():
    one = torch.tensor([[10.0, 0.0]])
    other = one + torch.tensor([[0.0, 0.1]])
    assert difference(one, other, torch.bfloat16).is_allowed and not difference(one, other, torch.float32).is_allowed
    assert difference(one, other, torch.float32, tolerance=0.02).is_allowed
    assert not difference(one, one * torch.nan, torch.bfloat16).is_allowed


@pytest.mark.slow
def test_another_process_without_this_package_gives_the_same_logits(base_folder):
    text = proof_text(AutoTokenizer.from_pretrained(base_folder), LlamaConfig())
    expected = logits_of(AutoModelForCausalLM.from_pretrained(base_folder), text.ids)
    assert torch.equal(logits_in_another_process(base_folder, text, torch.float32), expected)


def test_code_is_trusted_where_all_of_it_was_written_into_the_folder(tmp_path):
    config = tmp_path / "config.json"
    assert not brings_its_code(tmp_path)
    config.write_text('{"model_type": "llama"}')
    assert not brings_its_code(tmp_path)
    config.write_text('{"auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}')
    assert not brings_its_code(tmp_path)
    (tmp_path / "mine.py").touch()
    assert brings_its_code(tmp_path)
    config.write_text(
        '{"auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "someone/repository--modeling.Model"}}'
    )
    assert not brings_its_code(tmp_path)


@pytest.mark.slow
def test_a_reward_model_gives_its_score(base_folder, tmp_path):
    folder = shutil.copytree(base_folder, tmp_path / "reward")
    config = LlamaConfig.from_pretrained(folder, num_labels=1, pad_token_id=0)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    text = proof_text(AutoTokenizer.from_pretrained(folder), config)
    assert logits_in_another_process(folder, text, torch.float32).shape == (1,)


@pytest.mark.slow
def test_another_tokenizer_is_noticed(base_folder):
    text = proof_text(AutoTokenizer.from_pretrained(base_folder), LlamaConfig())
    with pytest.raises(CheckpointError, match="other tokens"):
        logits_in_another_process(base_folder, ProofText(text.text, [1, *text.ids]), torch.float32)
