import json

import pytest
import torch
from tiny_checkpoints import save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.checkpoints.model_folder import Tensors
from cpt.checkpoints.task_arithmetic import write_chat_vector
from cpt.errors import CheckpointError

TEMPLATE = "{% for message in messages %}<user>{{ message.content }}{% endfor %}"


def add_special(folder, *tokens, eos=None):
    """Let a saved model's vocabulary grow."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    model.resize_token_embeddings(len(tokenizer))
    if eos:
        tokenizer.eos_token, tokenizer.chat_template = eos, TEMPLATE
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def three(tokenizer_folder, tmp_path):
    return [save_llama(tmp_path / name, tokenizer_folder, seed) for seed, name in enumerate(("after", "base", "chat"))]


def merge(three, output, **options):
    return write_chat_vector(*three, output, **{"scale": 1.0, "dtype": None, "max_shard_size": "50KB"} | options)


def test_every_weight_is_after_plus_scaled_chat_minus_base(three, tmp_path):
    merge(three, tmp_path / "merged", scale=0.5)
    after, base, chat, merged = (Tensors(folder) for folder in (*three, tmp_path / "merged"))
    assert len(set(merged.files.values())) > 1
    for name in merged.files:
        assert torch.equal(merged.read(name), after.read(name) + 0.5 * (chat.read(name) - base.read(name)))


def test_tokens_of_either_model_alone_have_their_own_rows_in_the_merged_model(three, tmp_path):
    after, _, chat = three
    add_special(after, "<kinase>")
    add_special(chat, "<user>", "<end>", eos="<end>")
    told = merge(three, tmp_path / "merged")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
        AutoTokenizer.from_pretrained(tmp_path / "merged"),
    )
    ids, rows = tokenizer.get_vocab(), model.get_input_embeddings().weight
    assert rows.shape[0] == model.config.vocab_size == len(tokenizer) == 323
    speaker, theirs = AutoModelForCausalLM.from_pretrained(chat), AutoTokenizer.from_pretrained(chat).get_vocab()
    trained = AutoModelForCausalLM.from_pretrained(after)
    assert torch.equal(rows[ids["<user>"]], speaker.get_input_embeddings().weight[theirs["<user>"]])
    assert torch.equal(model.lm_head.weight[ids["<end>"]], speaker.lm_head.weight[theirs["<end>"]])
    assert torch.equal(rows[ids["<kinase>"]], trained.get_input_embeddings().weight[ids["<kinase>"]])
    assert "2 (<user>, <end>)" in told[0] and told[0].endswith("as trained: 1.")


def test_the_merged_model_speaks_and_ends_as_the_chat_model_does(three, tmp_path):
    after, _, chat = three
    add_special(after, "<kinase>")
    add_special(chat, "<user>", "<end>", eos="<end>")
    merge(three, tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    end = tokenizer.get_vocab()["<end>"]
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token_id == end == 322
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "merged" / name).read_text())["eos_token_id"] == end


def test_a_chat_model_of_another_shape_or_of_our_own_format_is_refused(three, tokenizer_folder, tmp_path):
    after, base, chat = three
    wide = save_llama(tmp_path / "wide", tokenizer_folder, 3, intermediate_size=96)
    with pytest.raises(CheckpointError, match="different shapes"):
        merge([after, base, wide], tmp_path / "merged")
    config = json.loads((chat / "config.json").read_text())
    (chat / "config.json").write_text(json.dumps(config | {"model_type": "minimind2"}))
    with pytest.raises(CheckpointError, match="checkpoint of `minimind2`. Export it first"):
        merge([after, base, chat], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
