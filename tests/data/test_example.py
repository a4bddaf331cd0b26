"""Columns of a file become examples: conversations, preferences, judged completions, prompts."""

import datetime
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpt.data.readers.columns import (
    FORMS,
    form_of,
    form_of_source,
    source_with_form,
    template_columns,
    with_form,
)
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
from cpt.errors import DataError, RecipeError
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
    ("chat", "missing"),
    [
        ({"messages": "talk"}, "talk"),
        ({"messages": "meta.talk", "system": "nothing"}, "meta.talk"),
        ({"messages": "messages", "tools": "calls"}, "calls"),
        ({"user": "{topic} {text}", "assistant": "text"}, "topic"),
    ],
)
def test_a_row_without_a_column_that_is_named_says_so(chat, missing):
    row = {"messages": [ASKED, ANSWERED], "text": "a", "calls": None, "topics": "b"}
    if missing == "calls":
        del row["calls"]
    with pytest.raises(BadValue, match=f"no column `{missing}`. Found: messages, text") as bad:
        written(row, "conversation", chat=chat)
    assert bad.value.reason == "missing column"


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
        HeldOut(path="e.jsonl", template="{a}"),
    ]
    data = Data(sources=[Source(path="a.jsonl")])
    _, evaluation = with_form(data, Evaluation(perplexity=sets), "preference")
    assert [form_of_source(one) for one in evaluation.perplexity] == [
        "preference",
        "document",
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
        ([], "not a chat"),
        ("Hi.", "not a chat"),
        ([{"value": "Hi."}], "not a chat"),
        ([{"from": "function_call", "value": "f()"}], "not a chat"),
        ([{"from": "function_call", "value": '{"arguments": {}}'}], "not a chat"),
        ([{"from": "function_call", "value": ["f"]}], "not a chat"),
        ([{"role": "user", "content": [{"type": "image", "text": "a"}]}], "not a chat"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "not a chat"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}], "not a chat"),
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
        ({"messages": "[{'role': 3}]"}, "conversation", "not a chat"),
        ({"messages": '["role", 3]'}, "conversation", "not a chat"),
        ({"messages": '[{"role": "user"'}, "conversation", "not a chat"),
        ({"messages": "a chat"}, "conversation", "not a chat"),
        ({"messages": '["Hi."]'}, "conversation", "not a chat"),
        ({"text": f"{MARK}a"}, "conversation", "control character"),
        ({"prompt": "a", "answer": {1, 2}}, "prompt", "wrong value"),
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


def test_parts_of_a_message_are_one_text_and_what_a_transform_changed_is_kept():
    parts = [{"type": "text", "text": "a"}, {"text": "b"}, {"type": "text", "text": "c"}]
    (found,) = messages_of(transcript([{"role": "user", "content": parts}], ""))
    assert found == {"role": "user", "content": "abc"}
    changed = messages_of(f"{MARK}user {{not JSON\nq\n{MARK}assistant\na")
    assert changed == [{"role": "user {not JSON", "content": "q"}, ANSWERED]
    both = {"from": "human", "value": "v", "content": "c", "role": "user"}
    (found,) = messages_of(transcript([both], ""))
    assert found == {"role": "user", "content": "c", "from": "human", "value": "v"}


def test_a_text_among_conversations_is_one_document():
    assert written({"text": "a"}, "conversation") == "a"
    assert written({"body": "a", "messages": [ASKED]}, "conversation", text_column="body") == "a"
    row = {"text": "x", "messages": [ASKED]}
    assert written(row, "conversation", template="<{text}>") == "<x>"
    chat = {"prompt": "asked", "completion": "b"}
    assert example({"asked": [ASKED], "b": [ANSWERED]}, "conversation", chat).prompt == [ASKED]
    assert example({"asked": [ASKED], "n": 3}, "prompt", "asked").prompt == [ASKED]


def test_conversations_that_contain_the_prompt_are_compared_whole():
    chosen, rejected = [ASKED, ANSWERED], [ASKED, {"role": "assistant", "content": "b"}]
    row = {"prompt": "q", "chosen": chosen, "rejected": rejected}
    found = example(row, "preference")
    assert (found.prompt, found.chosen, found.rejected) == (None, chosen, rejected)
    assert example(row | {"prompt": [SYSTEM]}, "preference").prompt == [SYSTEM]
    answers = {"chosen": chosen[1:], "rejected": rejected[1:]}
    with pytest.raises(BadValue):
        example({"prompt": "q", **answers}, "preference")


@pytest.mark.parametrize(
    ("value", "reason"), [(None, "null"), (True, "wrong type"), (["a"], "wrong type"), (3, None)]
)
def test_a_template_takes_strings_and_numbers(value, reason):
    source = Source(path="a.jsonl", template="{title}: {n}")
    row = {"title": "a", "n": value}
    if reason is None:
        assert text_of(row, source) == "a: 3"
        return
    with pytest.raises(BadValue) as bad:
        text_of(row, source)
    assert bad.value.reason == reason and bad.value.detail.startswith("`n` is ")


@pytest.mark.parametrize("chat", [{"prompt": "q", "system": "s"}, {"prompt": "q", "history": "h"}])
def test_only_messages_follow_a_system_prompt_or_earlier_turns(chat):
    with pytest.raises(BadValue) as bad:
        example({"q": "a text", "s": "s", "h": [["x", "y"]]}, "prompt", chat)
    assert bad.value.reason == "texts and messages" and "`q` must be a list" in bad.value.detail


@pytest.mark.parametrize(
    "template", ["{a", "}", "no column", "{}", "{0}", "{a[0]}", "{a!r}", "{a:>5}"]
)
def test_a_template_names_columns_and_nothing_else(template):
    with pytest.raises(RecipeError, match="the template"):
        template_columns(template)


def test_a_template_names_each_column_once_in_its_order():
    assert template_columns("{b} {{x}} {a} {b}") == ("b", "a")


def test_columns_of_a_stage_name_one_form():
    forms = {columns: form_of(columns) for columns in (*FORMS, ("input_ids", "labels"))}
    assert forms == {**FORMS, ("input_ids", "labels"): "document"}
    for columns, named in ((("text", "label"), "text, label"), ((), "none")):
        with pytest.raises(RecipeError, match=f"COLUMNS are {named}, expected those of: "):
            form_of(columns)


@pytest.mark.parametrize("form", ["preference", "unpaired", "prompt", "conversation", "document"])
def test_plain_text_files_are_refused_where_a_row_is_an_example(form, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    if form in ("conversation", "document"):
        assert [item.text for item in read(tmp_path / "a.txt", form)] == ["a"]
        return
    with pytest.raises(DataError, match=rf"`k.path`: {tmp_path}/a.txt has .txt files"):
        read(tmp_path / "a.txt", form)


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
