import pytest

from cpt.data.readers.filters import build_filters, reason_to_drop
from cpt.errors import RecipeError
from cpt.recipe.schema import Component


def view(text):
    return {"text": text, "source": "s", "where": "s.txt"}


def test_the_first_refusing_filter_gives_the_reason():
    filters = build_filters(
        {"data.filters": [Component(name="length", max_characters=2)], "k": [Component(name="pattern", drop="a")]},
    )
    assert [reason_to_drop(view(text), filters) for text in ("abc", "ab", "b")] == [
        "longer than 2 characters",
        "matches a",
        None,
    ]


@pytest.mark.parametrize(
    "component, message",
    [
        (Component(name="lenght"), "no filter called `lenght`. Did you mean `length`"),
        (Component(name="length", min_chars=3), r"`data.filters\[0\].min_chars` is not an option of length"),
        (Component(name="language"), r"`data.filters\[0\]` needs `keep`"),
        (
            Component(name="gopher_quality", stop_words="the"),
            r"`data.filters\[0\].stop_words`: expected a list, got 'the'",
        ),
        (Component(name="no_such_module:check"), "cannot import `no_such_module`"),
    ],
)
def test_a_wrong_filter_is_refused_with_its_place(component, message):
    with pytest.raises(RecipeError, match=message):
        build_filters({"data.filters": [component]})


@pytest.fixture
def my_filters(tmp_path, monkeypatch):
    (tmp_path / "my_lab_filters.py").write_text(
        "def no_tables(document, *, mark='|'):\n    return 'table' if mark in document['text'] else None\n"
        "def truthy(document):\n    return True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
