import json

import pytest

from cpt.data.readers.hub import read_hub
from cpt.recipe.schema import Source


@pytest.fixture(autouse=True)
def dataset(tmp_path, monkeypatch):
    """A folder called like a dataset's id is what `load_dataset` takes without the Hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/name").mkdir(parents=True)
    rows = [json.dumps({"text": text, "n": 1}) + "\n" for text in ["a", "b", None, "c"]]
    (tmp_path / "owner/name/train.jsonl").write_text("".join(rows))
    (tmp_path / "owner/name/more.jsonl").write_text(json.dumps({"text": "more"}) + "\n")


def read(**options):
    return list(read_hub(Source(path="owner/name", **options), "k", "main"))


@pytest.mark.parametrize("options", [{}, {"streaming": True}])
def test_a_dataset_is_read_row_by_row(options):
    a, b, bad, c = read(data_files=["train.jsonl"], **options)
    assert [item.text for item in (a, b, c)] == ["a", "b", "c"] and c.where == "owner/name: row 4"
    assert (bad.where, bad.reason, json.loads(bad.raw)) == ("owner/name: row 3", "null", {"text": None, "n": 1})
