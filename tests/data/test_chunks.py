import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import damage

from cpt.data.rows.build import build_data
from cpt.data.rows.packing import PACKINGS
from cpt.errors import DataError
from cpt.recipe.schema import Budget, Data, Source

NUMBER = 800


@pytest.fixture
def large(tmp_path, monkeypatch):
    """About 13 shards of numbered documents of very different lengths, in three files."""
    monkeypatch.setattr("cpt.data.store.shards.SHARD_BYTES", 2_000)
    folder = tmp_path / "large"
    folder.mkdir()
    lines = [
        json.dumps({"text": f"{number:04}" + "x" * (number % 40)}) + "\n"
        for number in range(NUMBER)
    ]
    for part, name in enumerate("abc"):
        (folder / f"{name}.jsonl").write_text("".join(lines[part::3]))
    return Source(path=str(folder))


@pytest.fixture
def chunked(build, large):
    """`chunked(cache="other")`: its rows in small chunks."""

    def run(**options):
        return build(large, **{"chunk_bytes": 6_000, **options})

    return run


def all_rows(prepared, numbers):
    return [prepared.rows[row]["input_ids"].tolist() for row in numbers]


def shards_on_disk(cache):
    return [path for path in (cache / "tokens").glob("*/*") if path.is_dir()]


def test_training_begins_with_one_shard(chunked, tmp_path):
    prepared = chunked()
    assert len(prepared.chunked[0].tokenized.plan.chunks) > 3
    prepared.rows[0]
    assert len(shards_on_disk(tmp_path / "cache")) == 1


LENGTHS = st.lists(st.integers(1, 90), min_size=2, max_size=60)
CASES = {
    "sequence_length": st.integers(8, 40),
    "chunk_bytes": st.integers(300, 3000),
    "packing": st.sampled_from(sorted(set(PACKINGS) - {"sliding_window", "concatenate"})),
}


@pytest.mark.heavy
@settings(max_examples=8)
@given(
    LENGTHS,
    st.lists(st.integers(0, 200), min_size=1, max_size=8),
    st.integers(0, 5),
    st.fixed_dictionaries(CASES),
)
def test_a_row_does_not_depend_on_what_was_read_before(tokenizer, lengths, numbers, seed, options):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.jsonl"
        texts = [
            f"{number:03}" + "abcdefg"[number % 7] * length for number, length in enumerate(lengths)
        ]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        data = Data(sources=[Source(path=str(path))], **options)
        straight, cold = (
            build_data(data, tokenizer, seed=seed, cache_dir=Path(folder) / cache).rows
            for cache in "ab"
        )
        in_order = {number: straight[number] for number in sorted(set(numbers))}
        for number in numbers:
            row, other = cold[number], in_order[number]
            assert row.keys() == other.keys() and all(
                torch.equal(row[name], other[name]) for name in row
            )


@pytest.mark.parametrize(
    ("pattern", "how"),
    [
        ("rows/*/000001.json", "truncate"),
        ("rows/*/000001.json", "missing"),
        ("rows/*/000001/starts.npy", "zeros"),
        ("tokens/*/*/tokens.bin", "bit flip"),
        ("tokens/*/*/tokens.bin", "missing"),
        ("tokens/*/*/description.json", "empty"),
    ],
)
def test_damage_to_a_source_that_is_half_read_changes_no_row(chunked, tmp_path, pattern, how):
    rows = all_rows(chunked(), range(100))
    damage(sorted((tmp_path / "cache").glob(pattern))[0], how)
    again = chunked()
    assert again.chunked[0].total is None and all_rows(again, range(100)) == rows


def test_the_fingerprint_does_not_depend_on_how_much_is_stored(chunked):
    first = chunked().fingerprint
    assert chunked(cache="other", whole=True).fingerprint == first == chunked().fingerprint
    assert chunked(chunk_bytes=16_000).fingerprint != first


def test_figures_of_a_source_are_estimated_from_its_first_chunks_in_use(chunked, caplog):
    caplog.set_level("INFO", "cpt")
    estimate, exact = chunked().sources[0], chunked(cache="other", whole=True).sources[0]
    assert estimate.is_estimate and not exact.is_estimate
    assert exact.documents == NUMBER and exact.files and not estimate.files
    for name in ("documents", "tokens", "rows"):
        assert vars(estimate)[name] == pytest.approx(vars(exact)[name], rel=0.1)
    assert estimate.text.trained == pytest.approx(exact.text.trained, rel=0.1)
    assert sum(estimate.lengths.values()) == pytest.approx(NUMBER, rel=0.1)
    assert estimate.padding == pytest.approx(exact.padding, abs=0.05)
    assert re.findall("estimated from the first (.) of (.)", caplog.text) == [("1", "7")]


def test_a_source_that_a_run_may_use_up_is_counted_first(build, large):
    num_tokens = sum(4 + number % 40 + 1 for number in range(NUMBER))
    limited = large.model_copy(update={"max_epochs": 2.0})
    for share, is_estimate in ((0.8, True), (0.97, False)):
        budget = Budget(tokens=int(share * 2 * num_tokens))
        (report,) = build(limited, chunk_bytes=6_000, budget=budget).sources
        assert report.is_estimate == is_estimate


def test_a_run_that_a_bad_row_ends_is_saved_with_the_last_chunk_before(chunked, large):
    path = Path(large.path) / "c.jsonl"
    path.write_text(path.read_text().replace('{"text": "0797', '{"toxt": "0797'))
    prepared = chunked()
    (rows,) = prepared.chunked
    number = 0
    with pytest.raises(DataError):
        while True:
            prepared.rows[number]
            number += 1
    made = len(list(rows.folder.glob("??????.json")))
    assert made >= 4
    prepared.rows[0]
    state = prepared.state(number)["chunks"]["large"]
    assert state["chunk"] == made - 1
    assert state["entry"]["first_row"] + state["entry"]["rows"] == number


def test_other_documents_than_those_a_run_began_with_are_refused(chunked):
    state = json.loads(json.dumps(chunked().state(200)))
    state["chunks"]["large"]["entry"]["own_digest"] = "what it was"
    other = chunked(cache="other")
    other.restore(state)
    with pytest.raises(DataError, match="documents differ from those"):
        other.rows[200]


def test_a_removed_chunk_is_made_again_the_same(chunked):
    prepared = chunked(whole=True)
    rows, other = all_rows(prepared, range(250)), chunked(whole=True)
    for folder in (prepared.chunked[0].folder, prepared.chunked[0].tokenized.folder):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
    (prepared.chunked[0].tokenized.folder / "description.json").unlink()
    tokenized = chunked().chunked[0].tokenized
    assert (
        len(tokenized.missing(range(len(tokenized.plan.shards)))) == len(tokenized.plan.shards) - 1
    )
    # `other` believes that all is there.
    assert all_rows(other, range(250)) == rows == all_rows(chunked(), range(250))


def test_bad_rows_end_the_run_before_the_chunk_that_holds_them_is_used(chunked, large):
    path = Path(large.path) / "c.jsonl"
    path.write_text(path.read_text().replace('{"text": "0797', '{"toxt": "0797'))
    with pytest.raises(DataError, match="c.jsonl:266: .*`text`"):
        all_rows(chunked(), range(400))
    for path in Path(large.path).iterdir():
        path.write_text(path.read_text().replace("5xxxxx", "5\\u0000"))
    with pytest.raises(DataError, match="data.max_bad_share"):
        all_rows(chunked(on_bad_row="skip", max_bad_share=0.01), range(400))
