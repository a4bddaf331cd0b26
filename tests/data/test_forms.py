import pytest

from cpt.data.readers.forms import (
    form_of,
    form_of_source,
    with_form,
)
from cpt.errors import RecipeError
from cpt.recipe.schema import Data, Evaluation, HeldOut, Source


def formed(form, chat, perplexity=(), **options):
    data = Data(sources=[Source(path="a.jsonl", chat=chat, **options)])
    return with_form(data, Evaluation(perplexity=list(perplexity)), form)


@pytest.mark.parametrize(
    ("columns", "form"),
    [
        (("text",), "document"),
        (["messages"], "conversation"),
        (("prompt", "chosen", "rejected"), "preference"),
        (("prompt", "completion", "label"), "judged"),
        (("prompt",), "prompt"),
    ],
)
def test_the_form_follows_from_the_columns(columns, form):
    assert form_of(columns) == form


@pytest.mark.parametrize(
    ("form", "chat", "said"),
    [
        (
            "preference",
            "talk",
            r"`data.sources\[0\].chat: talk` names one column, and this stage learns from prompt, chosen, rejected or",
        ),
        (
            "preference",
            {"messages": "a"},
            r"`data.sources\[0\].chat` names the columns of messages, and this stage learns from prompt, chosen",
        ),
        ("judged", {"prompt": "a", "completion": "b"}, "learns from prompt, completion, label"),
        (
            "document",
            {"prompt": "a", "completion": "b"},
            "names the columns of prompt, completion, and this stage learns from messages",
        ),
    ],
)
def test_columns_of_another_form_are_refused(form, chat, said):
    with pytest.raises(RecipeError, match=said):
        formed(form, chat)


def test_held_out_files_of_plain_texts_are_documents():
    sets = [
        HeldOut(path="a.jsonl"),
        HeldOut(path="b.txt.gz"),
        HeldOut(path="c.jsonl", template="{a}"),
        HeldOut(path="d.jsonl", text_column="a"),
    ]
    _, evaluation = formed("preference", None, sets)
    assert [form_of_source(one) for one in evaluation.perplexity] == ["preference", "document", "document", "document"]
