import json

import pytest

from cpt.data import plan
from cpt.data.build import build_data
from cpt.errors import DataError, RecipeError
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
def test_inside_a_part_they_are_shuffled_and_each_time_in_another_way(scored, build, tokenizer):
    prepared = build(scored)
    rows = prepared.sources[0].rows
    first, second = levels(prepared, tokenizer, range(20)), levels(prepared, tokenizer, range(rows, rows + 20))
    assert first != second and first != sorted(first)
    assert max(level for row in first + second for level in row) < 0.2 * NUMBER


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


def test_few_documents_are_not_spread_over_many_rows(build, tmp_path):
    (tmp_path / "few.csv").write_text("text,level\none,2\ntwo,1.5\n")
    assert build(Source(path=str(tmp_path / "few.csv"), order_by="level")).sources[0].rows == 1


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


def test_texts_have_no_columns_to_order_by(build, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="`order_by: level` gives it nan, expected a number"):
        build(Source(path=str(tmp_path / "a.txt"), order_by="level"))


def test_a_function_that_is_not_there_is_told(scored, build):
    with pytest.raises(RecipeError, match="cannot import `no_such_module`"):
        build(scored.model_copy(update={"order_by": "no_such_module:score"}))


@pytest.mark.slow
def test_changing_the_order_makes_the_tokens_anew_and_the_score_of_another_column_too(scored, build):
    first = build(scored).windowed[0].tokenized.name
    assert build(scored.model_copy(update={"order_by": None})).windowed[0].tokenized.name != first
