import pytest

from cpt.errors import RecipeError
from cpt.monitoring.constructors import check_constructor


class Slack:
    def __init__(self, channel: str, every: int = 10, *, mention: list[str] | None = None) -> None:
        pass


class Bare:
    pass


class Open:
    def __init__(self, **options) -> None:
        pass


class Hinted:
    def __init__(self, figure: "Unknown") -> None:  # noqa: F821 - as names that only a type checker knows
        pass


@pytest.mark.parametrize(
    ("kind", "options", "complaint"),
    [
        (Slack, {}, "`callbacks[0]` needs `channel`"),
        (Slack, {"chanel": "x"}, "Did you mean `channel`"),
        (Slack, {"channel": 3}, "`callbacks[0].channel`: expected text, got 3"),
        (Slack, {"channel": "x", "mention": "y"}, "expected a list or null"),
        (Bare, {"x": 1}, "It takes: none"),
        (Open, {"x": 1}, "takes \\*\\*kwargs"),
    ],
)
def test_wrong_options_are_refused_by_their_key(kind, options, complaint):
    with pytest.raises(RecipeError, match=complaint.replace("[", "\\[").replace("]", "\\]")):
        check_constructor(kind, options, "callbacks[0]")


def test_right_ones_pass():
    check_constructor(Slack, {"channel": "x", "every": 3, "mention": ["y"]}, "callbacks[0]")
    check_constructor(Slack, {"every": 3}, "callbacks[0]", given=("channel",))
    check_constructor(Bare, {}, "callbacks[0]")
    check_constructor(Hinted, {"figure": 1}, "callbacks[0]")
