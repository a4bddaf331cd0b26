import pytest

from cpt.data.forms import (
    columns_named,
    form_of,
    form_of_source,
    refuse_layout,
    refuse_texts,
    source_with_form,
    with_form,
)
from cpt.errors import DataError, RecipeError
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


def test_a_stage_that_names_the_tensors_of_a_row_reads_documents():
    assert form_of(("input_ids", "labels", "position_ids")) == "document"


def test_other_columns_are_of_no_form():
    with pytest.raises(
        RecipeError, match="COLUMNS are images, and data is made for: text; messages; prompt, chosen, rejected"
    ):
        form_of(("images",))


def test_plain_documents_stay_what_they_are():
    data, evaluation = Data(sources=[Source(path="a.jsonl", chat="talk")]), Evaluation()
    assert with_form(data, evaluation, "document") == (data, evaluation)
    assert form_of_source(data.sources[0]) == "document" and columns_named(data.sources[0]) == {"messages": "talk"}


@pytest.mark.parametrize(
    ("form", "chat", "named"),
    [
        ("conversation", None, {}),
        ("conversation", "talk", {"messages": "talk"}),
        ("prompt", "question", {"prompt": "question"}),
        ("conversation", {"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "a"}),
        ("conversation", {"messages": "m", "tools": "t"}, {"messages": "m", "tools": "t"}),
        ("preference", {"chosen": "a", "rejected": "b"}, {"chosen": "a", "rejected": "b"}),
    ],
)
def test_the_form_travels_with_the_source(form, chat, named):
    (source,) = formed(form, chat)[0].sources
    assert form_of_source(source) == form and columns_named(source) == named
    assert with_form(*formed(form, chat), form) == formed(form, chat), "twice is once"


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


def test_gaps_are_not_for_examples():
    data, _ = formed("conversation", None, fill_in_the_middle={})
    with pytest.raises(RecipeError, match=r"`data.sources\[0\].fill_in_the_middle` is for documents"):
        refuse_layout(data, "conversation")
    refuse_layout(data, "document")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (Source(path="texts"), "plain text is learned from in stage cpt"),
        (HeldOut(path="texts"), r"To measure the bits per byte of plain text, write texts/\*.txt"),
    ],
)
def test_files_of_text_are_no_pairs(source, said):
    with pytest.raises(
        DataError, match=rf"`k.path`: texts holds .txt files, .* the columns prompt, chosen, rejected or .*{said}"
    ):
        refuse_texts(source_with_form(source, "preference", "k"), ".txt", "k")
    refuse_texts(source_with_form(source, "conversation", "k"), ".txt", "k")
