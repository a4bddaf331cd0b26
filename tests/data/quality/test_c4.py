import pytest

from cpt.data.filters.built_in import c4

PAGE = 'It was late. "Who is there?" she asked. Nobody answered!'


def reason(text, **options):
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
    assert reason(text, **options) == expected
