import json

import pytest
import torch
from tiny_models import make_tokenizer
from transformers import AddedToken, AutoTokenizer, GPT2Config

from cpt.checkpoints.task_arithmetic import add_tokens, match_rows, merge_rows, vocabulary_tensors
from cpt.errors import CheckpointError
from cpt.tokenizer.extend_vocabulary import extend_vocabulary


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
    with pytest.raises(CheckpointError, match="--after: its tokenizer has 25 tokens, its weights 20 rows"):
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
