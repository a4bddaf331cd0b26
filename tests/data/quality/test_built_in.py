import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpt.data.readers.filters import (
    c4,
    fineweb,
    gopher_quality,
    gopher_repetition,
    keep_share,
    language,
    length,
    pattern,
    repeated_n_grams,
)

PROSE = " ".join(f"the house of number{number} and road{number * 7}" for number in range(20))


def view(text):
    return {"text": text, "source": "s", "where": "s"}


@pytest.mark.parametrize(
    "text, expected",
    [
        ("the and " * 24, "gopher: fewer than 50 words"),
        ("word " * 100_001, "gopher: more than 100000 words"),
        ("of a " * 50, "gopher: mean word length is not 3.0 to 10.0"),
        ("the incomprehensibilities " * 50, "gopher: mean word length is not 3.0 to 10.0"),
        (PROSE + " #x" * 20, "gopher: more than 0.1 symbols a word"),
        ("\n".join(f"- {line}" for line in PROSE.split(" the ")), "gopher: more than 0.9 of the lines are bullets"),
        (PROSE + "...\n" + PROSE + "\n" + PROSE + "…", "gopher: more than 0.3 of the lines end with an ellipsis"),
        (PROSE + " 12345" * 40, "gopher: fewer than 0.8 of the words have a letter"),
        (PROSE.replace("of", "off").replace("and", "plus"), "gopher: fewer than 2 stop words"),
    ],
    ids=lambda value: value[:20],
)
def test_each_rule_of_quality_has_its_reason(text, expected):
    assert gopher_quality(view(text)) == expected


def words(count, seed=0):
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefgh", k=6)) for _ in range(count))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("\n".join([*"abcdef", *"aaaa", words(100)]), "gopher: more than 0.3 of the lines are repeated"),
        ("\n".join([words(9), words(9), *"abc"]), "gopher: more than 0.2 of the characters are in repeated lines"),
        (
            "\n\n".join(["a", "b", "c\nd", "c\nd", "c\nd", words(50)]),
            "gopher: more than 0.3 of the paragraphs are repeated",
        ),
        ("see here " * 10 + words(20), "gopher: more than 0.2 of the characters are in one 2-gram"),
        (words(25) + " x " + words(6), "gopher: more than 0.15 of the characters are in repeated 5-grams"),
    ],
    ids=lambda value: value[-20:],
)
def test_each_rule_of_repetition_has_its_reason(text, expected):
    loose = (
        {"max_duplicate_lines": 1.0}
        if "paragraphs" in expected
        else {"max_top_n_grams": []}
        if "5-grams" in expected
        else {}
    )
    assert gopher_repetition(view(text), **loose) == expected


@given(st.lists(st.sampled_from(["a", "bb", "ccc"]), min_size=1, max_size=30))
def test_n_grams_are_counted_as_by_hand(sequence):
    for n, top, before in repeated_n_grams(sequence, 6):
        grams = [tuple(sequence[at : at + n]) for at in range(len(sequence) - n + 1)]
        most = max(map(grams.count, grams))
        assert top == max(most * len("".join(gram)) for gram in grams if grams.count(gram) == most) / len(
            "".join(sequence)
        )
        inside = {at + i for at, gram in enumerate(grams) if gram in grams[:at] for i in range(n)}
        assert before == sum(len(sequence[at]) for at in inside) / len("".join(sequence))


PAGE = 'It was late. "Who is there?" she asked. Nobody answered!'


def reason_of_c4(text, **options):
    return c4({"text": text, "source": "s", "where": "s"}, **options)


@pytest.mark.parametrize(
    "text, options, expected",
    [
        (PAGE + " Lorem Ipsum dolor.", {}, "c4: contains `lorem ipsum`"),
        (PAGE + " f() { return; }", {}, "c4: contains a curly bracket"),
        ("One. Two 3.14", {}, "c4: fewer than 3 sentences"),
        (PAGE + " A Darned day.", {"bad_words": ["darned"]}, "c4: contains a bad word"),
    ],
)
def test_each_rule_has_its_reason(text, options, expected):
    assert reason_of_c4(text, **options) == expected


def reason_of_fineweb(*lines, **options):
    return fineweb({"text": "\n".join(lines), "source": "s", "where": "s"}, **options)


def prose(count, end="."):
    return [f"This line number {number} is long enough to be prose{end}" for number in range(count)]


@pytest.mark.parametrize(
    "lines, expected",
    [
        (prose(88, "") + prose(12), "fineweb: at most 0.12 of the lines end with punctuation"),
        ([*prose(8), prose(1)[0]], "fineweb: at least 0.1 of the characters are in repeated lines"),
        (
            prose(33) + [f"Short {number}." for number in range(67)],
            "fineweb: at least 0.67 of the lines are shorter than 30 characters",
        ),
    ],
)
def test_each_rule_has_its_reason_at_its_published_limit(lines, expected):
    assert reason_of_fineweb(*lines) == expected


def test_length_gives_the_reason():
    assert length(view("abc"), min_characters=4) == "shorter than 4 characters"
    assert length(view("abc"), max_characters=2) == "longer than 2 characters"
    assert length(view("abc"), min_characters=3, max_characters=3) is None


def test_pattern_drops_and_requires():
    assert pattern(view("see Lorem ipsum"), drop="[Ll]orem") == "matches [Ll]orem"
    assert pattern(view("text"), require=r"\d") == r"does not match \d"
    assert pattern(view("text 1"), drop="x{2}", require=r"\d") is None


def sample(share, seed=0):
    return {number for number in range(4000) if keep_share(view(f"document {number}"), share=share, seed=seed) is None}


def test_a_sample_has_its_share_and_is_part_of_a_larger_one():
    assert 0.17 < len(sample(0.2)) / 4000 < 0.23
    assert sample(0.2) < sample(0.5) < sample(1.0) == set(range(4000))
    assert keep_share(view("document"), share=1e-12) == "not in the sample of 1e-12"


ENGLISH = {"text": "The cat sat on the mat, and nobody knew what it was thinking about.", "source": "s", "where": "s"}
GERMAN = {"text": "Die Katze saß auf der Matte, und niemand wusste, woran sie dachte.", "source": "s", "where": "s"}


def test_only_the_languages_asked_for_are_kept():
    assert language(ENGLISH, keep=["en"]) is None
    assert language(GERMAN, keep=["en"]) == "language is de"
    assert language(GERMAN, keep=["en", "de"]) is None
