import json

import pytest

from cpt.commands.tokenizer import Read, described, named_texts, read_texts
from cpt.errors import DataError


def test_a_text_is_called_as_it_is_named_or_by_its_path():
    sources = named_texts(["code=a/b.jsonl", "c/prose.txt", "s3://bucket/x=1/*.parquet"], "body")
    assert {name: source.path for name, source in sources.items()} == {
        "code": "a/b.jsonl",
        "prose": "c/prose.txt",
        "x=1": "s3://bucket/x=1/*.parquet",
    }
    assert all(source.text_column == "body" for source in sources.values())


def test_of_each_text_no_more_is_read_than_asked_and_it_is_said(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * 100}) + "\n" for _ in range(10)))
    read: dict[str, Read] = {}
    texts = list(read_texts(named_texts([f"a={tmp_path / 'a.jsonl'}"], "text"), 250, read))
    assert len(texts) == 3 and read["a"] == Read(3, 300, is_cut=True)
    assert described(read) == "a: 3 documents, 0.0 MB (its beginning)"


def test_a_text_that_is_not_there_is_told(tmp_path):
    with pytest.raises(DataError, match=r"no such file.* Set `--text`"):
        list(read_texts(named_texts([str(tmp_path / "none.txt")], "text"), 1, {}))
