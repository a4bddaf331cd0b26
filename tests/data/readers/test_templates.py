import pytest

from cpt.data.readers.documents import BadValue
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


@pytest.mark.parametrize(
    ("row", "said"), [({"b": "x"}, "no column `a`. It has: b"), ({"a": ["x"]}, "expected a text or a number")]
)
def test_what_cannot_be_filled_in_is_told(row, said):
    with pytest.raises(BadValue, match=said):
        filled_lines("{a}", row)
