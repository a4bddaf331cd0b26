import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CODE, KINDS, TEXTS, ids_of
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cpt.errors import DataError, RecipeError
from cpt.tokenizer.extend_vocabulary import extend_vocabulary, is_reached

N = 40
PAIRS = {}


@pytest.fixture(params=KINDS)
def pair(request):
    """A tokenizer and what the code makes of it."""
    if request.param not in PAIRS:
        tokenizer = KINDS[request.param]()
        PAIRS[request.param] = tokenizer, extend_vocabulary(tokenizer, CODE, N)
    return PAIRS[request.param]


words = st.sampled_from(
    [
        *"\n\t .,:()[]=#_0127aeiounst世界é😀",
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
)


@settings(deadline=None, max_examples=150)
@given(text=st.one_of(st.text(), st.lists(words).map("".join)))
@pytest.mark.parametrize("kind", KINDS)
def test_no_text_gets_longer_and_each_comes_back_as_before(kind, text):
    tokenizer = PAIRS.setdefault(
        kind, (made := KINDS[kind](), extend_vocabulary(made, CODE, N)) if kind not in PAIRS else PAIRS[kind]
    )
    before, extended = tokenizer[0], tokenizer[1].tokenizer
    old, new = ids_of(before, text), ids_of(extended, text)
    assert len(new) <= len(old)
    assert extended.decode(new) == before.decode(old)
    pieces = {token.id: token.pieces for token in tokenizer[1].tokens}
    assert [piece for number in new for piece in pieces.get(number, (number,))] == old  # the old tokens, joined


def test_each_new_token_is_reached_and_counted(pair):
    before, extension = pair
    assert len({token.token for token in extension.tokens}) == N
    assert all(is_reached(extension.tokenizer.backend_tokenizer, token.id) for token in extension.tokens)
    seen = [number for ids in ids_of(extension.tokenizer, CODE) for number in ids]
    assert {token.id: token.count for token in extension.tokens} == {
        token.id: seen.count(token.id) for token in extension.tokens
    }


def test_old_tokens_keep_their_ids_and_new_ones_follow(pair):
    before, extension = pair
    old, new = before.get_vocab(), extension.tokenizer.get_vocab()
    assert {token: new[token] for token in old} == old
    assert [token.id for token in extension.tokens] == [*range(max(old.values()) + 1, max(old.values()) + 1 + N)]
    assert [extension.tokenizer.convert_ids_to_tokens(token.id) for token in extension.tokens] == [
        t.token for t in extension.tokens
    ]
    assert not any(
        token.content in {t.token for t in extension.tokens}
        for token in extension.tokenizer.added_tokens_decoder.values()
    )


def test_it_is_read_back_with_its_special_tokens_and_post_processor(pair, tmp_path):
    before, extension = pair
    extension.tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = [*CODE, *TEXTS, "".join(before.all_special_tokens)]
    assert loaded(texts)["input_ids"] == extension.tokenizer(texts)["input_ids"]
    assert dict(zip(loaded.all_special_tokens, loaded.all_special_ids, strict=True)) == dict(
        zip(before.all_special_tokens, before.all_special_ids, strict=True)
    )
    assert loaded("a")["input_ids"][:-1] == before("a")["input_ids"][:-1]  # its begin token
    assert type(loaded) is type(AutoTokenizer.from_pretrained(tmp_path))


@pytest.mark.parametrize("documents", [[], ["", " \n"]])
def test_no_text_is_refused(documents):
    with pytest.raises(DataError, match="there is no text"):
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
    tokenizer.train_from_iterator(TEXTS, trainer(vocab_size=150, special_tokens=["[UNK]"], show_progress=False))
    with pytest.raises(RecipeError, match=f"{kind}, which has no merges"):
        extend_vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer), CODE, 3)


@pytest.mark.parametrize(
    ("key", "value", "why"), [("dropout", 0.1, "at random"), ("end_of_word_suffix", "</w>", "marks the parts")]
)
def test_a_bpe_of_another_kind_is_refused_with_the_reason(key, value, why):
    content = json.loads(KINDS["gpt2"]().backend_tokenizer.to_str())
    content["model"][key] = value
    changed = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))
    with pytest.raises(RecipeError, match=why):
        extend_vocabulary(changed, CODE, 3)
