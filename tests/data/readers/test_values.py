import pytest

from cpt.data.readers.documents import BadValue
from cpt.data.readers.values import columns_of, text_of
from cpt.errors import RecipeError
from cpt.recipe.schema import Source


def test_a_template_makes_the_text_of_several_columns():
    source = Source(path="a", template="{title}\n\n{body} ({year}) {{x}}")
    assert text_of({"title": "T", "body": "B", "year": 1999, "more": None}, source) == "T\n\nB (1999) {x}"
    assert columns_of(source) == ("title", "body", "year")


@pytest.mark.parametrize(
    "row, reason",
    [({"a": "x"}, "missing column"), ({"a": "x", "b": None}, "null"), ({"a": [], "b": ""}, "wrong type")],
)
def test_a_template_needs_all_its_columns(row, reason):
    with pytest.raises(BadValue) as error:
        text_of(row, Source(path="a", template="{a}{b}"))
    assert error.value.reason == reason


@pytest.mark.parametrize("template", ["{", "text", "{}", "{0}", "{a.b}", "{a[0]}", "{a!r}", "{a:>9}"])
def test_a_template_of_anything_but_columns_is_refused(template):
    with pytest.raises(RecipeError, match="the template"):
        columns_of(Source(path="a", template=template))
