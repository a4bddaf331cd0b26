import pytest
from tiny import write_documents

from cpt.data.rows.build import build_data
from cpt.errors import UserCodeError
from cpt.recipe.schema import Data

FAILS_AT_ELEVEN = """
def check(document, *, limit=10):
    if document["text"].endswith("number 11."):
        raise KeyError("no such word")

def change(document):
    check(document)
    return document

def score(text):
    check({"text": text})
    return 1.0

def rows():
    for number in range(20):
        check({"text": f"number {number}."})
        yield f"number {number}."
"""


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({"filters": [{"name": "my_failing_parts:check"}]}, "filter"),
        ({"transforms": [{"name": "my_failing_parts:change"}]}, "transform"),
        ({"order_by": "my_failing_parts:score"}, "score"),
        ({"path": "my_failing_parts:rows"}, "source"),
    ],
    ids=["filter", "transform", "order_by", "source"],
)
def test_an_error_of_a_users_part_names_it_with_file_and_row(tmp_path, monkeypatch, tokenizer, section, kind, workers):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CPT_WORKERS", workers)
    (tmp_path / "my_failing_parts.py").write_text(FAILS_AT_ELEVEN)
    write_documents(tmp_path / "a.jsonl", 20, seed=1)
    data = Data(sequence_length=64, sources=[{"path": "a.jsonl", **section}])
    with pytest.raises(UserCodeError) as error:
        build_data(data, tokenizer, seed=1, cache_dir=tmp_path / "cache")
    first = str(error.value).splitlines()[0]
    assert first.startswith("my_failing_parts:rows: item 12: " if kind == "source" else "a.jsonl:12: "), first
    assert kind in first and "my_failing_parts:" in first and "KeyError" in first
