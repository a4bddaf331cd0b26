import json

import numpy as np
import pytest
from tiny_tokenizers import KINDS, ids_of

from cpt.tokenizer.report import (
    Figures,
    TextFigures,
    as_json,
    costly_words,
    script_figures,
    script_of,
    vocabulary_figures,
    word_costs,
)


@pytest.mark.parametrize(
    ("word", "script"),
    [
        ("(word", "Latin"),
        ("Привет!", "Cyrillic"),
        ("世界", "Cjk"),
        ("안녕", "Hangul"),
        ("हिन्दी", "Devanagari"),
        ("3.14", "digits and signs"),
        ("", "digits and signs"),
    ],
)
def test_a_word_is_of_its_first_letters_script(word, script):
    assert script_of(word) == script


def test_a_script_is_summed_up_over_its_words_and_the_spaces_before_them():
    latin, cyrillic = script_figures({"ab": 3, "c": 1, "мир": 1}, {"ab": 2, "c": 1, "мир": 5})
    assert (latin.script, latin.words, latin.bytes, latin.tokens) == ("Latin", 4, 3 * 3 + 2, 7)
    assert (cyrillic.words, cyrillic.bytes, cyrillic.tokens) == (1, 7, 5)


def test_the_costliest_words_would_save_most_as_one_token():
    found = costly_words({"often": 10, "long": 3, "one": 99}, {"often": 2, "long": 9, "one": 1})
    assert [(one.word, one.count, one.tokens) for one in found] == [("long", 3, 9), ("often", 10, 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_words_cost_is_that_after_a_space(kind):
    tokenizer = KINDS[kind]()
    costs = word_costs(
        ["word", "the", "domain."], lambda texts: np.array([len(ids) for ids in ids_of(tokenizer, list(texts))])
    )
    inside = {word: len(ids_of(tokenizer, f"the {word}")) - len(ids_of(tokenizer, "the")) for word in costs}
    assert costs == inside


def test_the_vocabulary_is_told_seen_never_seen_special_and_longest():
    tokenizer = KINDS["gpt2"]()
    seen = np.zeros(len(tokenizer), np.int64)
    seen[(ids := ids_of(tokenizer, "the model reads"))] = 1
    found = vocabulary_figures(tokenizer, seen)
    assert (found.size, found.regular) == (len(tokenizer), len(tokenizer) - 1)
    assert len(found.never_seen) == found.regular - len(set(ids)) and not set(ids) & set(found.never_seen)
    assert found.special == [(len(tokenizer) - 1, "<|endoftext|>")]
    assert len(found.longest[0][1]) >= len(found.longest[-1][1]) > 1


def test_figures_become_json_with_their_ratios():
    figures = Figures("t", "engine", [TextFigures("code", documents=1, bytes=30, words=5, tokens=10)], [], [])
    text = json.loads(json.dumps(as_json(figures)))["texts"][0]
    assert (text["bytes_per_token"], text["tokens_per_word"]) == (3.0, 2.0)
