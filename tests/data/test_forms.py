import pytest

from cpt.data.readers.columns import form_of, form_of_source, with_form
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
    ("form", "chat"),
    [
        ("preference", "talk"),
        ("preference", {"messages": "a"}),
        ("judged", {"prompt": "a", "completion": "b"}),
        ("document", {"prompt": "a", "completion": "b"}),
    ],
)
def test_columns_of_another_form_are_refused(form, chat):
    with pytest.raises(RecipeError, match=r"`data.sources\[0\].chat"):
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
