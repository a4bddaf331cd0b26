import pytest

from cpt.errors import RecipeError
from cpt.stages.rewards import check_bounds, check_pattern, exact_match, length, matches_format, text_of

SAID = [{"role": "assistant", "content": " Paris\n"}]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("a b", "a b"),
        (SAID, " Paris\n"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "ab"),
        ([{"role": "assistant", "tool_calls": []}], ""),
        ([], ""),
    ],
)
def test_the_words_of_texts_and_messages_alike(written, text):
    assert text_of(written) == text


def test_an_exact_match_leaves_out_space_and_case():
    said, answers = ["paris ", SAID, "Paris.", "7"], ["Paris", "Paris", "Paris", 7]
    assert exact_match(["?"] * 4, said, answer=answers) == [1, 1, 0, 1]


def test_case_and_column_can_be_chosen():
    assert exact_match(["?"] * 2, ["paris", "Paris"], column="city", case_sensitive=True, city=["Paris"] * 2) == [0, 1]


def test_a_format_has_to_match_the_whole_completion():
    said = ["<a>\nx</a>", "<a>x</a> and more", [{"role": "assistant", "content": "<a></a>"}]]
    assert matches_format(["?"] * 3, said, pattern="<a>.*</a>") == [1, 0, 1]


def test_what_is_no_regular_expression_is_refused():
    with pytest.raises(RecipeError, match="regular expression"):
        check_pattern(pattern="(")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"at_most": 4}, [1, 1, 0]),
        ({"at_least": 4}, [0, 1, 1]),
        ({"at_most": 4, "falloff": 8}, [1, 1, 0.5]),
        ({"at_least": 4, "at_most": 4, "falloff": 4}, [0.5, 1, 0]),
    ],
)
def test_a_length_falls_off_outside_of_its_bounds(options, expected):
    ids = [[0] * 2, [0] * 4, [0] * 8]
    assert length(["?"] * 3, ["xx", "xxxx", "x" * 8], ids, unit="tokens", **options) == expected
    assert length(["?"] * 3, ["xx", "xxxx", "x" * 8], [[]] * 3, unit="characters", **options) == expected


def test_bounds_that_nothing_is_within_are_refused():
    with pytest.raises(RecipeError, match="at_least <= at_most"):
        check_bounds(at_least=5, at_most=4)
