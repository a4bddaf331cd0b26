import pytest

from cpt.report.found import at, mapping, mappings, number, numbers, text, texts

CONTENT = {"a": {"b": {"c": 3}, "names": ["x", 1, None], "rows": [{"d": 1}, "no row", {2: 3}], "word": "yes"}}


def test_what_is_there_is_found():
    assert (at(CONTENT, "a", "b", "c"), number(CONTENT, "a", "b", "c"), text(CONTENT, "a", "word")) == (3, 3.0, "yes")
    assert mapping(CONTENT, "a", "b") == {"c": 3}


def test_of_a_list_only_what_is_of_the_kind_is_taken():
    assert texts(CONTENT, "a", "names") == ["x"]
    assert mappings(CONTENT, "a", "rows") == [{"d": 1}, {"2": 3}]


@pytest.mark.parametrize("content", [None, 3, "a", [], {}, {"a": None}, {"a": [1]}])
def test_what_is_not_there_is_empty(content):
    assert (at(content, "a", "b"), number(content, "a", "b"), text(content, "a", "b")) == (None, None, "")
    assert (
        mapping(content, "a", "b"),
        mappings(content, "a", "b"),
        texts(content, "a", "b"),
        numbers(content, "a", "b"),
    ) == (
        {},
        [],
        [],
        {},
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, True, "3", None, [3]])
def test_only_finite_numbers_are_numbers(value):
    assert number({"a": value}, "a") is None and numbers({"a": {"b": value, "c": 2}}, "a") == {"c": 2.0}
