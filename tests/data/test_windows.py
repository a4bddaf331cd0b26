import json

import pytest
from tiny_run import DAMAGES, damage

from cpt.data.rows.build import build_data
from cpt.errors import DataError
from cpt.recipe.schema import Data, Evaluation, Source

SHARD, WINDOW, NUMBER = 2_000, 8_000, 2_000


@pytest.fixture
def large(tmp_path, monkeypatch):
    """About 33 shards of numbered documents of very different lengths, in three files."""
    monkeypatch.setattr("cpt.data.store.shards.SHARD_BYTES", SHARD)
    folder = tmp_path / "large"
    folder.mkdir()
    lines = [json.dumps({"text": f"{number:04}" + "x" * (number % 40)}) + "\n" for number in range(NUMBER)]
    for part, name in enumerate("abc"):
        (folder / f"{name}.jsonl").write_text("".join(lines[part::3]))
    return Source(path=str(folder))


@pytest.fixture
def build(tokenizer, tmp_path):
    def run(*sources, cache="cache", seed=1, whole=False, evaluation=None, budget=None, **data):
        recipe = Data(**{"sources": list(sources), "sequence_length": 64, "window_bytes": WINDOW, **data})
        given = evaluation or Evaluation()
        return build_data(
            recipe, tokenizer, seed=seed, evaluation=given, budget=budget, cache_dir=tmp_path / cache, whole=whole
        )

    return run


def all_rows(prepared, number):
    return [prepared.rows[row]["input_ids"].tolist() for row in range(number)]


def test_training_begins_with_one_shard(large, build, tmp_path):
    prepared = build(large)
    assert len(prepared.windowed[0].tokenized.plan.windows) > 5
    prepared.rows[0]
    assert len([path for path in (tmp_path / "cache" / "tokens").glob("*/*") if path.is_dir()]) == 1


def test_cold_warm_prepared_and_resumed_rows_are_the_same(large, build):
    cold = all_rows(build(large), 900)
    assert all_rows(build(large), 900) == cold, "warm"
    assert all_rows(build(large, cache="prepared", whole=True), 900) == cold
    resumed = build(large, cache="resumed")
    assert [resumed.rows[row]["input_ids"].tolist() for row in (850, 3, 400, 899)] == [
        cold[row] for row in (850, 3, 400, 899)
    ]


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize(
    "pattern",
    ["rows/*/000001.json", "rows/*/000001/starts.npy", "tokens/*/*/tokens.bin", "tokens/*/*/description.json"],
)
def test_damage_to_a_source_that_is_half_read_changes_no_row(large, build, tmp_path, pattern, how):
    rows = all_rows(build(large), 200)
    damage(sorted((tmp_path / "cache").glob(pattern))[0], how)
    again = build(large)
    assert again.windowed[0].total is None and all_rows(again, 200) == rows


def test_the_fingerprint_does_not_depend_on_how_much_is_stored(large, build):
    first = build(large).fingerprint
    assert build(large, cache="other", whole=True).fingerprint == first == build(large).fingerprint
    assert build(large, window_bytes=16_000).fingerprint != first


def test_a_checkpoint_goes_on_where_the_store_is_empty(large, build, tmp_path):
    straight = build(large)
    rows, state = all_rows(straight, 600), json.loads(json.dumps(straight.state(400)))
    resumed = build(large, cache="empty")
    resumed.restore(state)
    assert [resumed.rows[row]["input_ids"].tolist() for row in range(400, 600)] == rows[400:]
    shards = [path for path in (tmp_path / "empty" / "tokens").glob("*/*") if path.is_dir()]
    assert len(shards) < len(straight.windowed[0].tokenized.plan.shards) / 1.5, "what came before was not read again"


def test_other_documents_than_those_a_run_began_with_are_refused(large, build, tmp_path):
    state = json.loads(json.dumps(build(large).state(400)))
    window = state["windows"]["large"]
    window["entry"]["own_digest"] = "what it was"
    other = build(large, cache="other")
    other.restore(state)
    with pytest.raises(DataError, match="not those that the run began with"):
        other.rows[400]


def test_a_removed_window_is_made_again_the_same(large, build):
    prepared = build(large, whole=True)
    rows, other = all_rows(prepared, 600), build(large, whole=True)
    for window in range(prepared.windowed[0].total.windows):
        prepared.windowed[0].remove(window)
    tokenized = prepared.windowed[0].tokenized
    assert tokenized.missing(range(len(tokenized.plan.shards))) == list(range(len(tokenized.plan.shards)))
    assert all_rows(other, 600) == rows, "which believes that all is there"
    assert all_rows(build(large), 600) == rows


def test_a_bad_row_is_told_before_the_window_that_holds_it_is_used(large, build, tmp_path):
    path = tmp_path / "large" / "c.jsonl"
    path.write_text(path.read_text().replace('{"text": "1997', '{"toxt": "1997'))
    prepared = build(large)
    with pytest.raises(DataError, match=r"c.jsonl:666: no column `text`"):
        all_rows(prepared, 900)


def test_too_many_bad_rows_end_the_run_as_soon_as_that_is_sure(large, build, tmp_path):
    for name in "abc":
        path = tmp_path / "large" / f"{name}.jsonl"
        path.write_text(path.read_text().replace("5xxxxx", "5\\u0000"))
    with pytest.raises(DataError, match="of the first .* rows are bad, more than `data.max_bad_share`"):
        all_rows(build(large, on_bad_row="skip", max_bad_share=0.01), 900)
