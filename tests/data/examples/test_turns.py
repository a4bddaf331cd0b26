import pytest

from cpt.data.readers.columns import source_with_form
from cpt.data.readers.example import example_of, text_of
from cpt.recipe.schema import Source

ASKED, ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


def example(row, form, chat=None):
    return example_of(text_of(row, source_with_form(Source(path="a.jsonl", chat=chat), form, "k")))


def test_a_question_and_its_answer_are_a_conversation():
    chat = {"user": "q", "assistant": "a", "system": "s", "history": "h"}
    row = {"q": "q", "a": "a", "s": "s", "h": [["x", "y"]]}
    earlier = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    for form in ("conversation", "document"):
        assert example(row, form, chat).messages == [SYSTEM, *earlier, ASKED, ANSWERED]
        assert example(row | {"s": "", "h": None}, form, chat).messages == [ASKED, ANSWERED], (
            "a row need not have them"
        )
        assert example({"q": "q", "a": "a"}, form, chat).messages == [ASKED, ANSWERED]


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"instruction": "q", "input": "", "output": "a"}, "conversation"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "conversation"),
    ],
)
def test_files_of_alpaca_and_sharegpt_are_known_by_their_columns(row, form):
    assert example(row, form).messages == [ASKED, ANSWERED]


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "q", "chosen": "a", "rejected": "b"},
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
    ],
)
def test_preferences_of_alpaca_and_sharegpt(row):
    found = example(row, "preference")
    assert (found.prompt, found.chosen, found.rejected) == (
        [ASKED],
        [ANSWERED],
        [{"role": "assistant", "content": "b"}],
    )


def test_the_last_turn_is_what_was_judged():
    found = example({"messages": [SYSTEM, ASKED, ANSWERED], "label": True}, "judged")
    assert (found.prompt, found.completion, found.label) == ([SYSTEM, ASKED], [ANSWERED], True)
    found = example({"q": "q", "a": "a", "good": 0}, "judged", {"user": "q", "assistant": "a", "label": "good"})
    assert (found.prompt, found.completion, found.label) == ([ASKED], [ANSWERED], False)
