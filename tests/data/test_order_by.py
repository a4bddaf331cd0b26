import json

import pytest

from cpt.data.build import build_data
from cpt.data.store import plan
from cpt.errors import DataError
from cpt.recipe.schema import Data, Evaluation, Source

NUMBER = 1500


@pytest.fixture
def scored(tmp_path, monkeypatch):
    """Numbered documents in shards, whose score is not the order of the file."""
    monkeypatch.setattr(plan, "SHARD_BYTES", 4_000)
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


def levels(prepared, tokenizer, rows):
    """The scores of the documents in some rows, row by row."""
    texts = [tokenizer.decode(prepared.rows[row]["input_ids"]) for row in rows]
    parts = [[part[:4] for part in text.replace("<pad>", "").split("<|endoftext|>") if part] for text in texts]
    return [[int(number) * 7 % NUMBER for number in row] for row in parts]


def test_documents_come_from_low_scores_to_high_ones_and_all_of_them(scored, build, tokenizer):
    prepared = build(scored)
    read = levels(prepared, tokenizer, range(prepared.sources[0].rows))
    assert sorted(level for row in read for level in row) == list(range(NUMBER))
    means = [sum(row) / len(row) for row in read]
    tenth = len(means) // 10
    tenths = [sum(means[at * tenth : (at + 1) * tenth]) / tenth for at in range(10)]
    assert tenths == sorted(tenths) and tenths[0] < 0.08 * NUMBER and tenths[-1] > 0.92 * NUMBER


@pytest.mark.slow
def test_a_function_of_the_text_may_give_the_score(scored, build, tokenizer, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_scores.py").write_text("def length(text):\n    return len(text)\n")
    prepared = build(scored.model_copy(update={"order_by": "my_scores:length"}))
    texts = [tokenizer.decode(prepared.rows[row]["input_ids"]) for row in range(prepared.sources[0].rows)]
    assert "xx" not in texts[0] and "xxxxxxxx" in texts[-1]


def test_held_out_documents_stay_out(scored, build, tokenizer):
    prepared = build(scored, evaluation=Evaluation(held_out_share=0.2))
    read = levels(prepared, tokenizer, range(prepared.sources[0].rows))
    assert len({level for row in read for level in row}) + prepared.sources[0].held_out == NUMBER
    assert prepared.held_out["scored"].num_documents == prepared.sources[0].held_out


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
