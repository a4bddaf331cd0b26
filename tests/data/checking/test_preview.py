import copy
import json

import pytest

from cpt.data.checking.preview import Example, packed_rows, see_source
from cpt.data.encoders import encoder_of
from cpt.data.tokenization import DocumentEncoder
from cpt.recipe.schema import Component, Data, Source


def test_documents_are_sorted_into_kept_dropped_and_bad(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "kept"}\n{"text": "no"}\n{"text": 1}\n{"text": " "}\n{"text": "no"}\n{"text": "late"}\n'
    )
    data = Data(sources=[Source(path=str(tmp_path / "a.jsonl"))], filters=[Component(name="length", min_characters=3)])
    seen = see_source(data, data.sources[0], "data.sources[0]", 5)
    assert [example.text for example in seen.kept] == ["kept"]
    assert seen.lost == {"shorter than 3 characters": 2, "bad row: wrong type": 1, "empty": 1}
    assert seen.examples["shorter than 3 characters"] == Example(f"{tmp_path}/a.jsonl:2", "no")


def test_a_chat_that_the_template_refuses_is_shown_as_dropped(tokenizer, tmp_path):
    talking = copy.deepcopy(tokenizer)
    talking.chat_template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}{{ messages[0].content }}"
    )
    lines = [json.dumps({"messages": [{"role": role, "content": "Hi."}]}) for role in ("user", "assistant")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = Source(path=str(tmp_path / "a.jsonl"), chat="messages")
    encoder = encoder_of(source, DocumentEncoder(talking), "data.sources[0]")
    seen = see_source(Data(sources=[source]), source, "data.sources[0]", 5, encoder)
    assert len(seen.kept) == 1 and seen.lost == {"the chat template says: user first": 1}


@pytest.mark.parametrize("num_rows", [0, 1, 3, 100])
def test_rows_show_whole_documents_with_their_places(tokenizer, num_rows):
    kept = [Example(f"a:{number}", "x" * number) for number in range(1, 30)]
    data = Data(sources=[Source(path="a")], sequence_length=32)
    rows = list(packed_rows(kept, DocumentEncoder(tokenizer), data, 0, num_rows))
    assert len(rows) <= num_rows and all(sum(len(part.ids) for part in parts) <= 32 for _, parts in rows)
    for _, parts in rows:
        assert all(f"a:{len(part.ids) - 1}" == part.where for part in parts)
    if num_rows == 100:
        assert sorted(part.where for _, parts in rows for part in parts) == sorted(example.where for example in kept)
