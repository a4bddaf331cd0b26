import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpt.data.filters.built_in import gopher_quality, gopher_repetition, repeated_n_grams

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
