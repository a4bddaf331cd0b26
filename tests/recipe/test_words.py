"""Values and types as people say them."""

import pytest

from cpt.recipe.words import expected, fits, in_words, in_yaml


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-5, "1e-5"),
        (2.5e20, "2.5e20"),
        (0.0001, "0.0001"),
        (1.0, "1.0"),
        (float("-inf"), "-.inf"),
        (float("nan"), ".nan"),
        (None, "null"),
        (True, "true"),
        ("a", "a"),
        ({"a": [1, {"b": None}]}, "{a: [1, {b: null}]}"),
    ],
)
def test_a_value_reads_like_yaml(value, text):
    assert in_yaml(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", 'the text "a"'),
        (None, "nothing"),
        ({}, "an empty section"),
        ({"a": 1}, "keys and values (a)"),
        ([1, 2], "a list of 2"),
        (3, "3"),
    ],
)
def test_a_value_is_told_with_its_kind(value, text):
    assert in_words(value) == text


def test_a_long_text_is_shortened():
    assert in_words("x" * 100) == f'the text "{"x" * 57}..."'


@pytest.mark.parametrize(
    ("value", "kinds", "does"),
    [
        (1, {"float"}, True),
        (True, {"int"}, False),
        (True, {"float"}, False),
        (1e9, {"int"}, True),
        (1.5, {"int"}, False),
        (float("inf"), {"int"}, False),
        (None, {"null", "str"}, True),
        (None, {"str"}, False),
        ("1", {"int"}, False),
    ],
)
def test_a_value_fits_its_kind_unbent(value, kinds, does):
    assert fits(value, kinds) is does


@pytest.mark.parametrize(
    ("kinds", "got", "said"),
    [
        ({"int", "float"}, "x", 'expected a number, got the text "x"'),
        ({"bool", "str", "null"}, [], "expected true or false or text, got a list of 0"),
        ({"bool"}, "Off", 'expected true or false, got the text "Off": write true or false'),
        ({"str", "null"}, 5, "expected text, got 5: put quotes around it"),
        ({"float"}, "1e-5", 'expected a number, got the text "1e-5": write it without quotes'),
        ({"float"}, "010", 'expected a number, got the text "010"'),
        ({"null"}, 1, "expected null, got 1"),
    ],
)
def test_what_is_expected_is_said_with_what_to_write(kinds, got, said):
    assert expected(kinds, got) == said
