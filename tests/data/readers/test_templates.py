import pytest

from cpt.data.readers.documents import BadValue
from cpt.data.readers.example import columns_in, filled_lines
from cpt.errors import RecipeError


def test_a_column_or_those_of_a_template():
    assert columns_in("answer") == ("answer",) and columns_in("{a}\n{b} {a}") == ("a", "b")
    with pytest.raises(RecipeError, match="must name columns"):
        columns_in("{}")


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"a": "one", "b": "two"}, "{} one\nsee: two\nend"),
        ({"a": "one", "b": ""}, "{} one\nend"),
        ({"a": "one", "b": None}, "{} one\nend"),
        ({"a": "one"}, "{} one\nend"),
        ({"a": "", "b": 2}, "{} \nsee: 2\nend"),
    ],
)
def test_lines_with_nothing_in_them_are_left_out(row, text):
    assert filled_lines("{{}} {a}\nsee: {b}\nend", row) == text


def test_a_heading_goes_with_its_paragraph():
    template = "# Task\n{task}\n\n# Input\n{input}\n\n# Answer\n"
    assert filled_lines(template, {"task": "a", "input": "b"}) == "# Task\na\n\n# Input\nb\n\n# Answer\n"
    assert filled_lines(template, {"task": "a {x}", "input": ""}) == "# Task\na {x}\n\n# Answer\n"


@pytest.mark.parametrize(
    ("row", "said"), [({"b": "x"}, "no column `a`. It has: b"), ({"a": ["x"]}, "expected a text or a number")]
)
def test_what_cannot_be_filled_in_is_told(row, said):
    with pytest.raises(BadValue, match=said):
        filled_lines("{a}", row)
