import pytest

from cpt.data.filters.built_in import fineweb


def reason(*lines, **options):
    return fineweb({"text": "\n".join(lines), "source": "s", "where": "s"}, **options)


def prose(count, end="."):
    return [f"This line number {number} is long enough to be prose{end}" for number in range(count)]


@pytest.mark.parametrize(
    "lines, expected",
    [
        (prose(88, "") + prose(12), "fineweb: at most 0.12 of the lines end with punctuation"),
        ([*prose(8), prose(1)[0]], "fineweb: at least 0.1 of the characters are in repeated lines"),
        (
            prose(33) + [f"Short {number}." for number in range(67)],
            "fineweb: at least 0.67 of the lines are shorter than 30 characters",
        ),
    ],
)
def test_each_rule_has_its_reason_at_its_published_limit(lines, expected):
    assert reason(*lines) == expected
