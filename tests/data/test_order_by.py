import json

import pytest

from cpt.data.rows.build import build_data
from cpt.errors import DataError
from cpt.recipe.schema import Data, Source

NUMBER = 1500


@pytest.fixture
def scored(tmp_path, monkeypatch):
    """Numbered documents in shards, whose score is not the order of the file."""
    monkeypatch.setattr("cpt.data.store.shards.SHARD_BYTES", 4_000)
    path = tmp_path / "scored.jsonl"
    rows = ({"text": f"{number:04}" + "x" * (number % 9), "level": number * 7 % NUMBER} for number in range(NUMBER))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(path=str(path), order_by="level")


@pytest.fixture
def build(tokenizer, tmp_path):
    def run(source, **options):
        data = Data(sources=[source], sequence_length=32)
        return build_data(data, tokenizer, seed=1, cache_dir=tmp_path / "cache", **options)

    return run


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"text": "a"}', "no column `level`"),
        ('{"text": "a", "level": "high"}', "expected a number to order by"),
        ('{"text": "a", "level": null}', "`level` is null"),
    ],
)
def test_a_row_without_a_score_is_bad(build, tmp_path, row, reason):
    (tmp_path / "a.jsonl").write_text(f"{row}\n")
    with pytest.raises(DataError, match=reason):
        build(Source(path=str(tmp_path / "a.jsonl"), order_by="level"))
