import numpy as np
import pytest

from benchmarks.scale.start import build, measured
from benchmarks.scale.tables import KINDS, SEQUENCE_LENGTH, budget_of, lengths_of, make_files, make_store, tokenizer

TOKENS = 4 * 10**8


def test_files_are_as_large_as_they_say_and_hold_nothing(tmp_path):
    make_files(tmp_path, 2 * 2**30 + 5)
    files = sorted(tmp_path.rglob("*.jsonl"))
    assert [file.stat().st_size for file in files] == [2**30, 2**30, 5] and sum(
        file.stat().st_blocks for file in files
    ) == 0


@pytest.mark.parametrize("name", KINDS)
def test_a_shard_is_16_mib_of_text_in_documents_of_its_kind(name):
    kind = KINDS[name]
    lengths = np.concatenate([lengths_of(kind, np.random.default_rng([0, place])) for place in range(16)])
    assert lengths.sum() * kind.bytes_per_token == pytest.approx(256 * 2**20, rel=0.1)
    assert np.median(lengths) == pytest.approx(kind.median_tokens, rel=0.2)


@pytest.mark.long
def test_cpt_finds_a_prepared_store_whose_every_row_can_be_asked_for(tmp_path):
    make_store(tmp_path, TOKENS)
    prepared = build(tmp_path, TOKENS, tokenizer())
    assert all(rows.is_complete for rows in prepared.windowed) and not any(
        report.is_estimate for report in prepared.sources
    )
    assert prepared.num_tokens == pytest.approx(TOKENS, rel=0.05), "shards are whole ones, the last ones too"
    assert len(prepared.windowed[0].tokenized.plan.windows) > 4
    number = budget_of(TOKENS).tokens // SEQUENCE_LENGTH
    for row in np.linspace(0, number - 1, 60).astype(int).tolist():
        assert prepared.rows.documents_in(row).sum() <= SEQUENCE_LENGTH
        assert len(prepared.rows[row]["input_ids"]) == SEQUENCE_LENGTH
    found = measured(tmp_path, TOKENS)
    assert found["off_points"]["1.0"] < 0.3 and found["rows"] == number and found["memory_start"] < 200 * 2**20
