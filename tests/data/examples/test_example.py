import datetime
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpt.data.readers.columns import source_with_form
from cpt.data.readers.documents import BadRow, BadValue, Piece
from cpt.data.readers.example import CONTROL, PART, example_of, text_of
from cpt.data.readers.sources import read_piece
from cpt.recipe.schema import Source

TEXT = st.text().filter(lambda text: not set(CONTROL) & set(text) and "\0" not in text)
TALK = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXT}), min_size=1, max_size=3
)


def written(row, form, **options):
    return text_of(row, source_with_form(Source(path="a.jsonl", **options), form, "k"))


@pytest.mark.parametrize("words", [TEXT, TALK])
@given(data=st.data())
def test_an_example_gives_its_parts_back(words, data):
    prompt, one, other = (data.draw(words) for _ in range(3))
    preference = example_of(written({"prompt": prompt, "chosen": one, "rejected": other}, "preference"))
    assert (preference.prompt, preference.chosen, preference.rejected) == (prompt, one, other)
    judged = example_of(written({"prompt": prompt, "completion": one, "label": True}, "judged"))
    assert (judged.prompt, judged.completion, judged.label) == (prompt, one, True)
    row = example_of(written({"prompt": prompt, "answer": {"a": [1, None]}}, "prompt"))
    assert (row.prompt, row.columns) == (prompt, {"answer": {"a": [1, None]}})


@pytest.mark.parametrize(
    ("row", "form", "reason"),
    [
        ({"text": "a"}, "preference", "missing columns"),
        ({"messages": None}, "conversation", "no value"),
        ({"prompt": 1}, "prompt", "wrong value"),
        ({"prompt": "a", "completion": [{"role": "a", "content": "b"}]}, "conversation", "texts and messages"),
        ({"prompt": "a", "completion": "b", "label": "maybe"}, "judged", "wrong value"),
        ({"prompt": "a", "completion": "b", "label": None}, "judged", "no value"),
        ({"prompt": f"a{PART}"}, "prompt", "control character"),
        ({"text": f"{PART}a"}, "conversation", "control character"),
        ({"messages": [{"role": "a", "content": "b"}], "tools": "{"}, "conversation", "wrong value"),
    ],
)
def test_what_is_no_example_is_told(row, form, reason):
    with pytest.raises(BadValue) as bad:
        written(row, form)
    assert bad.value.reason == reason


def read(path, form, **options):
    source = source_with_form(Source(path=str(path), **options), form, "k")
    return list(read_piece(source, Piece(str(path)), "k"))


CALLS = [{"function": {"name": "f", "arguments": {"a": 1}}}]
TALKS = [
    [{"role": "assistant", "content": None, "tool_calls": CALLS}, {"role": "user", "content": "b", "tool_calls": None}]
]


def test_a_parquet_file_gives_examples_of_any_form(tmp_path):
    path = tmp_path / "a.parquet"
    dates = [datetime.date(2024, 7, 26)]
    table = {
        "messages": TALKS,
        "prompt": ["p"],
        "completion": ["c"],
        "label": [True],
        "chosen": ["c"],
        "rejected": ["r"],
        "day": dates,
    }
    pq.write_table(pa.table(table), path)
    (talk,) = read(path, "conversation")
    assert example_of(talk.text).messages == [
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "user", "content": "b"},
    ], "what a table puts into each message because another one has it is not there"
    assert example_of(read(path, "preference")[0].text)[:4] == ("p", None, "c", "r")
    assert example_of(read(path, "judged")[0].text).label is True
    assert example_of(read(path, "prompt")[0].text).columns["day"] == "2024-07-26"
    (bad,) = read(path, "preference", chat={"chosen": "good", "rejected": "rejected"})
    assert isinstance(bad, BadRow) and "no column `good`. It has: messages, prompt" in bad.detail


def test_a_csv_file_gives_examples(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id,prompt,completion,label\n1,p,c,True\n2,p,d,0\n")
    assert [example_of(item.text).label for item in read(path, "judged")] == [True, False]
    assert example_of(read(path, "prompt")[1].text).columns == {"id": "2", "completion": "d", "label": "0"}


@pytest.mark.parametrize("form", ["conversation", "preference"])
def test_messages_that_are_json_in_a_text_are_messages(form):
    said = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]
    row = (
        {"messages": said}
        if form == "conversation"
        else {"prompt": said[:1], "chosen": said[1:], "rejected": said[1:]}
    )
    assert written({name: json.dumps(value, indent=1) for name, value in row.items()}, form) == written(row, form)
