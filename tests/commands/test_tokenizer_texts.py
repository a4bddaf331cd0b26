import json

import pytest

from cpt.commands.tokenizer import describe, open_texts
from cpt.errors import DataError


def test_a_text_has_its_given_name_or_the_name_of_its_path():
    texts = open_texts(["code=a/b.jsonl", "c/prose.txt", "s3://bucket/x=1/*.parquet"], "body", 1)
    assert {name: text.source.path for name, text in texts.items()} == {
        "code": "a/b.jsonl",
        "prose": "c/prose.txt",
        "x=1": "s3://bucket/x=1/*.parquet",
    }
    assert all(text.source.text_column == "body" for text in texts.values())


def test_only_the_beginning_of_a_long_text_is_read_and_reported_as_such(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * 400_000}) + "\n" for _ in range(10)))
    texts = open_texts([f"a={tmp_path / 'a.jsonl'}"], "text", 1)
    assert len(list(texts["a"])) == 3 and texts["a"].is_cut and texts["a"].bytes == 1_200_000
    assert describe(texts) == "a: 3 documents, 1.2 MB (its beginning)"


def test_a_missing_text_is_an_error_that_names_the_option(tmp_path):
    with pytest.raises(DataError, match=r"no such file.* Set `--text`"):
        list(open_texts([str(tmp_path / "none.txt")], "text", 1)["none"])
