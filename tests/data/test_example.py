"""Columns of a file become examples: conversations, preferences, judged completions, prompts."""

import datetime
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpt.data.readers.columns import form_of_source, source_with_form, with_form
from cpt.data.readers.documents import BadRow, BadValue, Piece
from cpt.data.readers.example import (
    CONTROL,
    MARK,
    PART,
    example_of,
    filled_lines,
    messages_of,
    text_of,
    transcript,
)
from cpt.data.readers.sources import read_piece
from cpt.errors import RecipeError
from cpt.recipe.schema import Data, Evaluation, HeldOut, Source

ASKED, ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
TEXT = st.text().filter(lambda text: not set(CONTROL) & set(text) and "\0" not in text)
TALK = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXT}),
    min_size=1,
    max_size=3,
)


def written(row, form, **options):
    return text_of(row, source_with_form(Source(path="a.jsonl", **options), form, "k"))


def example(row, form, chat=None):
    return example_of(written(row, form, chat=chat))


@pytest.mark.parametrize(
    ("form", "chat"),
    [("preference", "talk"), ("document", {"prompt": "a", "completion": "b"})],
    ids=str,
)
def test_columns_of_another_form_are_refused(form, chat):
    with pytest.raises(RecipeError, match=r"`data.sources\[0\].chat"):
        with_form(Data(sources=[Source(path="a.jsonl", chat=chat)]), Evaluation(), form)


def test_held_out_files_of_plain_texts_are_documents():
    sets = [
        HeldOut(path="a.jsonl"),
        HeldOut(path="b.txt.gz"),
        HeldOut(path="d.jsonl", text_column="a"),
    ]
    data = Data(sources=[Source(path="a.jsonl")])
    _, evaluation = with_form(data, Evaluation(perplexity=sets), "preference")
    assert [form_of_source(one) for one in evaluation.perplexity] == [
        "preference",
        "document",
        "document",
    ]


@pytest.mark.parametrize("words", [TEXT, TALK])
@given(data=st.data())
def test_an_example_gives_its_parts_back(words, data):
    prompt, one, other = (data.draw(words) for _ in range(3))
    preference = example({"prompt": prompt, "chosen": one, "rejected": other}, "preference")
    assert (preference.prompt, preference.chosen, preference.rejected) == (prompt, one, other)
    judged = example({"prompt": prompt, "completion": one, "label": True}, "unpaired")
    assert (judged.prompt, judged.completion, judged.label) == (prompt, one, True)
    row = example({"prompt": prompt, "answer": {"a": [1, None]}}, "prompt")
    assert (row.prompt, row.columns) == (prompt, {"answer": {"a": [1, None]}})


CALL = [
    {
        "type": "function",
        "function": {"name": "add", "arguments": {"b": 2, "a": [1, None, "\n<|im_end|> é"]}},
    }
]


def test_tool_calls_and_thoughts_of_messages_are_kept_in_their_order():
    talk = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": CALL,
            "reasoning_content": "I add.\nThen",
        },
        {"role": "tool", "content": "3", "name": "add", "tool_call_id": "1"},
        {"role": "assistant", "content": "", "tool_calls": CALL},
    ]
    found = messages_of(transcript(talk, ""))
    assert found == talk and list(found[0]["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "no value"),
        (["Hi."], "not a chat"),
        ([{"role": "user"}], "not a chat"),
        ([{"role": "a\nb", "content": "Hi."}], "not a chat"),
        ([{"role": "a", "content": "", "name": f"a{PART}"}], "control character"),
        ([{"role": "a", "content": "", "score": float("nan")}], "wrong value"),
        ([{"role": "user", "content": f"a{MARK}b"}], "control character"),
    ],
)
def test_messages_that_are_no_chat_have_a_reason(messages, reason):
    with pytest.raises(BadValue) as bad:
        transcript(messages, "messages")
    assert bad.value.reason == reason


@pytest.mark.parametrize(
    ("row", "form", "reason"),
    [
        ({"text": "a"}, "preference", "missing columns"),
        ({"prompt": 1}, "prompt", "wrong value"),
        ({"prompt": "a", "completion": [ANSWERED]}, "conversation", "texts and messages"),
        ({"prompt": "a", "completion": "b", "label": "maybe"}, "unpaired", "wrong value"),
        ({"prompt": "a", "completion": "b", "label": None}, "unpaired", "no value"),
        ({"prompt": f"a{PART}"}, "prompt", "control character"),
        ({"messages": [ANSWERED], "tools": "{"}, "conversation", "wrong value"),
    ],
)
def test_a_row_that_is_no_example_has_a_reason(row, form, reason):
    with pytest.raises(BadValue) as bad:
        written(row, form)
    assert bad.value.reason == reason


def test_a_question_and_its_answer_are_a_conversation():
    chat = {"user": "q", "assistant": "a", "system": "s", "history": "h"}
    row = {"q": "q", "a": "a", "s": "s", "h": [["x", "y"]]}
    earlier = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    for form in ("conversation", "document"):
        assert example(row, form, chat).messages == [SYSTEM, *earlier, ASKED, ANSWERED]
        assert example(row | {"s": "", "h": None}, form, chat).messages == [ASKED, ANSWERED]
        assert example({"q": "q", "a": "a"}, form, chat).messages == [ASKED, ANSWERED]


@pytest.mark.parametrize(
    "history", [3, "xy", {"xy": 1}, ["xy"], [["x"]], [["x", "y", "z"]], [["x", 3]], [["x", "y"], 3]]
)
def test_earlier_turns_that_are_no_pairs_of_texts_are_refused(history):
    chat = {"user": "q", "assistant": "a", "history": "h"}
    with pytest.raises(BadValue) as bad:
        example({"q": "q", "a": "a", "h": history}, "conversation", chat)
    assert bad.value.reason == "not a chat"
    assert bad.value.detail.startswith("`h` is ")
    assert bad.value.detail.endswith(", expected a list of [question, answer]")


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "q", "input": "", "output": "a"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"messages": json.dumps([ASKED, ANSWERED], indent=1)},
    ],
)
def test_conversations_of_alpaca_and_sharegpt_and_in_json_are_known(row):
    assert example(row, "conversation").messages == [ASKED, ANSWERED]


def said(role, value):
    return {"from": role, "value": value}


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "q", "chosen": "a", "rejected": "b"},
        {
            "conversations": [said("human", "q")],
            "chosen": said("gpt", "a"),
            "rejected": said("gpt", "b"),
        },
    ],
)
def test_preferences_of_alpaca_and_sharegpt_are_known(row):
    found = example(row, "preference")
    assert (found.prompt, found.chosen) == ([ASKED], [ANSWERED])
    assert found.rejected == [{"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    "calls", [{"name": "f", "arguments": {"a": 1}}, [{"name": "f", "arguments": {"a": 1}}]]
)
def test_function_calls_of_sharegpt_and_what_came_of_them(calls):
    talk = [said("system", "s"), said("function_call", json.dumps(calls)), said("observation", "2")]
    system, asked, found = messages_of(transcript(talk, "conversations"))
    assert system == SYSTEM and found == {"role": "tool", "content": "2"}
    assert asked["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]


def test_the_last_turn_is_what_was_judged():
    found = example({"messages": [SYSTEM, ASKED, ANSWERED], "label": True}, "unpaired")
    assert (found.prompt, found.completion, found.label) == ([SYSTEM, ASKED], [ANSWERED], True)
    found = example(
        {"q": "q", "a": "a", "good": 0},
        "unpaired",
        {"user": "q", "assistant": "a", "label": "good"},
    )
    assert (found.prompt, found.completion, found.label) == ([ASKED], [ANSWERED], False)


def read(path, form, **options):
    source = source_with_form(Source(path=str(path), **options), form, "k")
    return list(read_piece(source, Piece(str(path)), "k"))


def test_a_parquet_file_gives_examples_of_any_form(tmp_path):
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    columns = {"messages": [[called, ASKED | {"tool_calls": None}]], "label": [True]}
    columns |= {name: [name[0]] for name in ("prompt", "completion", "chosen", "rejected")}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns | {"day": [datetime.date(2024, 7, 26)]}), path)
    (talk,) = read(path, "conversation")
    # A table gives each message all fields that another one has.
    assert example_of(talk.text).messages == [called, ASKED]
    assert example_of(read(path, "preference")[0].text)[:4] == ("p", None, "c", "r")
    assert example_of(read(path, "unpaired")[0].text).label is True
    assert example_of(read(path, "prompt")[0].text).columns["day"] == "2024-07-26"
    (bad,) = read(path, "preference", chat={"chosen": "good", "rejected": "rejected"})
    assert isinstance(bad, BadRow) and "`good`" in bad.detail


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"a": "one", "b": "two"}, "{} one\nsee: two\nend"),
        ({"a": "one", "b": None}, "{} one\nend"),
        ({"a": "one"}, "{} one\nend"),
        ({"a": "", "b": 2}, "{} \nsee: 2\nend"),
    ],
)
def test_lines_of_a_template_without_a_value_are_left_out(row, text):
    assert filled_lines("{{}} {a}\nsee: {b}\nend", row) == text
