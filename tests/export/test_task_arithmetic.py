import json

import pytest
import torch
from tiny_checkpoints import save_llama
from tiny_models import make_tokenizer
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer, GPT2Config

from cpt.checkpoints.model_folder import Tensors
from cpt.errors import CheckpointError
from cpt.export.task_arithmetic import add_tokens, match_rows, merge_rows, vocabulary_tensors, write_chat_vector
from cpt.tokenizer.extend_vocabulary import extend_vocabulary

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
    with pytest.raises(CheckpointError, match="is of `minimind2`. Export it first"):
        merge([after, base, chat], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def tokenizer_with(*added, words=20):
    tokenizer = make_tokenizer(words)
    tokenizer.add_tokens([AddedToken(token, special=token.startswith("<")) for token in added])
    return tokenizer


def rows_of(*values):
    return torch.tensor(values, dtype=torch.float32)[:, None].repeat(1, 3)


def test_equal_vocabularies_are_added_row_by_row_padding_included():
    rows = match_rows(tokenizer_with(), tokenizer_with(), tokenizer_with(), (24, 24, 24))
    after, base, chat = torch.rand(24, 3), torch.rand(24, 3), torch.rand(24, 3)
    assert torch.equal(merge_rows(rows, after, base, chat, 0.5), after + 0.5 * (chat - base)) and not rows.added


def test_tokens_are_matched_by_their_string_and_tokens_of_one_model_keep_their_row():
    after, base, chat = tokenizer_with("kinase"), tokenizer_with(), tokenizer_with("<|im_start|>", "<|im_end|>")
    rows = match_rows(after, base, chat, (21, 20, 32))
    merged = merge_rows(rows, rows_of(*range(100, 121)), rows_of(*range(20)), rows_of(*range(0, 64, 2)), 1.0)
    assert rows.added == ["<|im_start|>", "<|im_end|>"] and merged.shape == (23, 3)
    assert merged[:20, 0].tolist() == [100 + number + (2 * number - number) for number in range(20)]
    assert merged[20, 0] == 120 and merged[21:, 0].tolist() == [
        40,
        42,
    ]  # kinase as trained, the marks as the chat model has them


def test_another_tokenizer_is_refused_with_some_of_its_tokens():
    with pytest.raises(CheckpointError, match="--chat lacks 10 of the 17 tokens.*'w10'"):
        match_rows(tokenizer_with(), tokenizer_with(), make_tokenizer(10), (20, 20, 20))
    with pytest.raises(CheckpointError, match="--chat has 5 pieces of its own"):
        match_rows(tokenizer_with(), tokenizer_with(), make_tokenizer(25), (20, 20, 25))
    with pytest.raises(CheckpointError, match="--after has 25 tokens, but 20 rows"):
        match_rows(make_tokenizer(25), tokenizer_with(), tokenizer_with(), (20, 20, 20))


@pytest.mark.parametrize(("tie", "expected"), [(True, {"wte.weight"}), (False, {"wte.weight", "lm_head.weight"})])
def test_embeddings_and_head_are_found_under_the_names_that_are_stored(tie, expected):
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, tie_word_embeddings=tie)
    stored = ["wte.weight", "wpe.weight", "h.0.ln_1.weight", *(["lm_head.weight"] if not tie else [])]
    assert vocabulary_tensors(config, stored) == expected


def test_a_vocabulary_extended_by_continued_bpe_takes_a_chat_models_tokens_behind_its_own(tokenizer_folder, corpus):
    base, chat = AutoTokenizer.from_pretrained(tokenizer_folder), AutoTokenizer.from_pretrained(tokenizer_folder)
    texts = [json.loads(line)["text"] for line in (corpus / "domain.jsonl").read_text().splitlines()]
    after = extend_vocabulary(base, texts, 12).tokenizer
    chat.add_tokens(["<tool>", "</tool>"], special_tokens=True)
    rows = match_rows(after, base, chat, (384, 320, 322))
    merged = add_tokens(after, chat, rows)
    assert (
        rows.kept == 12
        and rows.total == 384
        and (merged.get_vocab()["<tool>"], merged.get_vocab()["</tool>"]) == (332, 333)
    )
    assert (
        merged.decode(merged("the model <tool>reads", add_special_tokens=False)["input_ids"])
        == "the model <tool>reads"
    )
