import json

from tiny_tokenizers import CODE, KINDS, ids_of
from tokenizers import Tokenizer

from cpt.commands.tokenizer_report import NO_UTF8, NOT_FOUND, OTHER_TOKENS, unreachable_tokens
from cpt.tokenizer.extend_vocabulary import is_reached


def with_token(token, merge=None):
    """GPT-2's kind with one token more."""
    content = json.loads(KINDS["gpt2"]().backend_tokenizer.to_str())
    content["model"]["vocab"][token] = 400
    content["model"]["merges"] += [merge] if merge else []
    return Tokenizer.from_str(json.dumps(content))


def why(backend, number=400, seen=None):
    return {one.id: one.why for one in unreachable_tokens(backend, seen or {})}.get(number)


def test_why_no_text_gives_a_token():
    assert why(with_token("Ġcolour")) == OTHER_TOKENS
    assert why(with_token("qz", ["q", "z"])) is None
    assert why(with_token("aĠ", ["a", "Ġ"])) == NOT_FOUND
    assert why(with_token("aĠ", ["a", "Ġ"]), seen={400: 1}) is None


def test_of_a_trained_tokenizer_only_the_bytes_that_utf8_never_has_are_unreachable():
    found = list(unreachable_tokens(KINDS["llama3"]().backend_tokenizer, {}))
    assert len(found) == 13 and {one.why for one in found} == {NO_UTF8}


def test_tokens_that_were_learned_under_another_rule_for_words_are_not_found():
    """Qwen2 reads each digit alone; the tiny vocabulary was learned with up to three digits in a word."""
    found = [one for one in unreachable_tokens(KINDS["qwen2"]().backend_tokenizer, {}) if one.why != NO_UTF8]
    assert found and all(one.token.isdecimal() and len(one.token) > 1 and one.why == NOT_FOUND for one in found)


def test_an_added_token_is_not_asked_about():
    tokenizer = KINDS["gpt2"]()
    tokenizer.add_tokens(["colour_of"])
    assert "colour_of" not in {one.token for one in unreachable_tokens(tokenizer.backend_tokenizer, {})}


def test_what_is_told_unreachable_never_comes_out_of_a_text():
    backend = with_token("values", None)
    unreachable = {one.id for one in unreachable_tokens(backend, {})}
    assert 400 in unreachable
    assert not unreachable & {number for text in CODE for number in backend.encode(text).ids}


def test_a_part_of_a_character_is_asked_of_the_merges():
    tokenizer = KINDS["gpt2"]()
    part = ids_of(tokenizer, "😀")[0]
    assert is_reached(tokenizer.backend_tokenizer, part)
