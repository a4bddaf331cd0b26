import pytest

from cpt.data.readers.example import filled_lines


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
