import json

import pytest
import torch
from tiny_checkpoints import save_llama
from tiny_models import make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.checkpoints.model_folder import Tensors
from cpt.contrib.merging.task_arithmetic import match_rows, write_chat_vector
from cpt.errors import CheckpointError

TEMPLATE = "{% for message in messages %}<user>{{ message.content }}{% endfor %}"


def add_special(folder, *tokens, eos=None):
    """Let a saved model's vocabulary grow."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    model.resize_token_embeddings(len(tokenizer))
    if eos:
        tokenizer.eos_token, tokenizer.chat_template = eos, TEMPLATE
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture
def three(tokenizer_folder, tmp_path):
    return [
        save_llama(tmp_path / name, tokenizer_folder, seed)
        for seed, name in enumerate(("after", "base", "chat"))
    ]


def merge(three, output, scale=1.0):
    return write_chat_vector(*three, output, scale=scale, dtype=None)


@pytest.fixture
def grown(three, tmp_path):
    """The merged model of two that have tokens of their own."""
    add_special(three[0], "<kinase>")
    add_special(three[2], "<user>", "<end>", eos="<end>")
    merge(three, tmp_path / "merged")
    return tmp_path / "merged"


def embedding(folder, token):
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    return model.get_input_embeddings().weight[tokenizer.get_vocab()[token]]


def test_tokens_of_either_model_alone_have_their_own_rows_in_the_merged_model(three, grown):
    after, base, chat = three
    assert torch.equal(embedding(grown, "<user>"), embedding(chat, "<user>"))
    assert torch.equal(embedding(grown, "<kinase>"), embedding(after, "<kinase>"))
    of_all = [embedding(folder, "a") for folder in (after, base, chat)]
    assert torch.equal(embedding(grown, "a"), of_all[0] + (of_all[2] - of_all[1]))
    heads = [Tensors(folder).read("lm_head.weight") for folder in (grown, chat)]
    assert torch.equal(heads[0][-1], heads[1][-1]) and len(heads[0]) == len(
        AutoTokenizer.from_pretrained(grown)
    )


def test_the_merged_model_speaks_and_ends_as_the_chat_model_does(grown):
    tokenizer = AutoTokenizer.from_pretrained(grown)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.eos_token_id == tokenizer.get_vocab()["<end>"] == 322
    for name in ("config.json", "generation_config.json"):
        assert json.loads((grown / name).read_text())["eos_token_id"] == 322


def test_a_chat_model_of_our_own_format_is_refused(three, tmp_path):
    after, base, chat = three
    config = json.loads((chat / "config.json").read_text())
    (chat / "config.json").write_text(json.dumps(config | {"model_type": "minimind2"}))
    with pytest.raises(CheckpointError, match="minimind2"):
        merge([after, base, chat], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("after_words", "chat_words", "named"),
    [(20, 10, "--chat lacks 10 of the 17"), (20, 25, "--chat has 5"), (25, 20, "--after has 25")],
)
def test_another_tokenizer_is_refused(after_words, chat_words, named):
    with pytest.raises(CheckpointError, match=named):
        match_rows(
            make_tokenizer(after_words),
            make_tokenizer(20),
            make_tokenizer(chat_words),
            (20, 20, 25),
        )
