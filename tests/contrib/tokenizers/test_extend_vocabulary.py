import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CODE, KINDS, TEXTS, ids_of
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cpt.contrib.tokenizers.extend_vocabulary import (
    MAX_TOKEN_CHARACTERS,
    extend_vocabulary,
    is_reached,
    join_in,
    learn_merges,
    read_bpe,
)
from cpt.errors import DataError, RecipeError

N = 40


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    """A tokenizer and what the code makes of it."""
    tokenizer = KINDS[request.param]()
    return tokenizer, extend_vocabulary(tokenizer, CODE, N)


PARTS = [
    "self",
    "value",
    "return ",
    "    ",
    "def ",
    "colour",
    " is not None",
    "表示",
    "<s>",
    "<|im_start|>",
]
words = st.sampled_from([*"\n\t .,:()[]=#_0127aeiounst世界é😀", *PARTS])


@settings(deadline=None, max_examples=60)
@given(text=st.one_of(st.text(), st.lists(words).map("".join)))
def test_no_text_gets_longer_and_each_comes_back_as_before(pair, text):
    before, extension = pair
    old, new = ids_of(before, text), ids_of(extension.tokenizer, text)
    assert len(new) <= len(old)
    assert extension.tokenizer.decode(new) == before.decode(old)
    pieces = {token.id: token.pieces for token in extension.tokens}
    assert [
        piece for number in new for piece in pieces.get(number, (number,))
    ] == old  # the old tokens, joined


def test_each_new_token_is_reached_and_counted(pair):
    _, extension = pair
    assert len({token.token for token in extension.tokens}) == N
    assert all(
        is_reached(extension.tokenizer.backend_tokenizer, token.id) for token in extension.tokens
    )
    seen = Counter(number for ids in ids_of(extension.tokenizer, CODE) for number in ids)
    assert all(token.count == seen[token.id] for token in extension.tokens)


def test_old_tokens_keep_their_ids_and_new_ones_follow(pair):
    before, extension = pair
    old, new = before.get_vocab(), extension.tokenizer.get_vocab()
    assert {token: new[token] for token in old} == old
    first = max(old.values()) + 1
    assert {token.token: token.id for token in extension.tokens} == {
        extension.tokenizer.convert_ids_to_tokens(number): number
        for number in range(first, first + N)
    }
    added = {token.content for token in extension.tokenizer.added_tokens_decoder.values()}
    assert not added & {token.token for token in extension.tokens}


def test_it_is_read_back_with_its_special_tokens_and_post_processor(pair, tmp_path):
    before, extension = pair
    extension.tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = [*CODE, *TEXTS, "".join(before.all_special_tokens)]
    assert loaded(texts)["input_ids"] == extension.tokenizer(texts)["input_ids"]
    assert loaded.all_special_tokens == before.all_special_tokens
    assert loaded.all_special_ids == before.all_special_ids
    assert loaded("a")["input_ids"][:-1] == before("a")["input_ids"][:-1]  # its begin token


@pytest.mark.parametrize("documents", [[], ["", " \n"]])
def test_no_text_is_refused(documents):
    with pytest.raises(DataError):
        extend_vocabulary(KINDS["gpt2"](), documents, 3)


@pytest.mark.parametrize(
    ("model", "trainer", "kind"),
    [
        (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer, "WordPiece"),
        (models.Unigram(), trainers.UnigramTrainer, "Unigram"),
    ],
)
def test_a_tokenizer_without_merges_is_refused_with_the_reason(model, trainer, kind):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        TEXTS, trainer(vocab_size=150, special_tokens=["[UNK]"], show_progress=False)
    )
    with pytest.raises(RecipeError, match=kind):
        extend_vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer), CODE, 3)


@pytest.mark.parametrize(("key", "value"), [("dropout", 0.1), ("end_of_word_suffix", "</w>")])
def test_a_bpe_of_another_kind_is_refused(key, value):
    content = json.loads(KINDS["gpt2"]().backend_tokenizer.to_str())
    content["model"][key] = value
    changed = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))
    with pytest.raises(RecipeError):
        extend_vocabulary(changed, CODE, 3)


@pytest.mark.parametrize(
    ("allowed", "tokens"),
    [(True, ["▁value", "values", "▁▁▁▁", ".(", "▁2"]), (False, ["24", "x(", "a▁b", "▁▁a"])],
)
def test_a_sentencepiece_token_is_letters_or_signs_or_one_digit_of_one_word(allowed, tokens):
    bpe = read_bpe(KINDS["llama2"]())
    assert [bpe.may_be_token(token) for token in tokens] == [allowed] * len(tokens)


# Merges

LETTERS = dict(enumerate("abcd"))
words_and_counts = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=2, max_size=9), st.integers(1, 20)),
    min_size=1,
    max_size=12,
)


def learn(words, counts, number, forbidden=(), may_be_token=lambda token: True):
    return learn_merges(words, counts, LETTERS, number, 4, forbidden, may_be_token)


@settings(deadline=None, max_examples=40)
@given(words_and_counts)
def test_the_merges_are_those_of_counting_anew_after_each(found):
    words, counts = [word for word, _ in found], [count for _, count in found]
    expected, tokens, current = [], dict(LETTERS), words
    for number in range(4, 12):
        pairs = Counter()
        for word, count in zip(current, counts, strict=True):
            for pair in zip(word, word[1:], strict=False):
                pairs[pair] += count
        taken = set(tokens.values())
        allowed = {
            pair: n
            for pair, n in pairs.items()
            if n > 1 and tokens[pair[0]] + tokens[pair[1]] not in taken
        }
        if not allowed:
            break
        best = min(allowed, key=lambda pair: (-allowed[pair], pair))
        expected.append((best, allowed[best]))
        tokens[number] = tokens[best[0]] + tokens[best[1]]
        current = [join_in(word, best, number) for word in current]
    merges = learn(words, counts, 8, LETTERS.values())
    assert [((one.left, one.right), one.count) for one in merges] == expected


def test_forbidden_and_unwanted_strings_are_skipped():
    merges = learn([[0, 1], [2, 3], [1, 2]], [4, 3, 2], 9, {"ab"}, lambda token: token != "cd")
    assert [one.token for one in merges] == ["bc"]


def test_tokens_do_not_grow_without_end():
    assert max(len(one.token) for one in learn([[0] * 200], [50], 100)) <= MAX_TOKEN_CHARACTERS


# Tokens that no text gives


def with_token(token, merge=None):
    """GPT-2's kind with one more token, whose id is 400."""
    content = json.loads(KINDS["gpt2"]().backend_tokenizer.to_str())
    content["model"]["vocab"][token] = 400
    content["model"]["merges"] += [merge] if merge else []
    return Tokenizer.from_str(json.dumps(content))


@pytest.mark.parametrize(
    ("token", "merge", "reached"),
    [("Ġcolour", None, False), ("qz", ["q", "z"], True), ("aĠ", ["a", "Ġ"], False)],
)
def test_a_token_that_no_text_gives_is_unreachable(token, merge, reached):
    assert is_reached(with_token(token, merge), 400) == reached


def test_tokens_that_were_learned_under_another_rule_for_words_are_not_found():
    """Qwen2 reads each digit alone; the tiny vocabulary was learned with up to three digits in a word."""
    backend = KINDS["qwen2"]().backend_tokenizer
    ids = backend.get_vocab(with_added_tokens=False)
    found = [token for token, number in ids.items() if not is_reached(backend, number)]
    assert found and all(token.isdecimal() and len(token) > 1 for token in found)
