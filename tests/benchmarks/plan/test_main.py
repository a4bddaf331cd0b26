import pytest

from benchmarks.plan.__main__ import MODELS, WAYS, cell, draw, results_of


@pytest.mark.slow
def test_a_cell_is_close_and_the_results_say_so(tmp_path):
    found = cell("gpt2/124m", 256, "half precision, checkpointing, fused loss, 4 rows")
    assert 0.97 <= found["formula"] / found["dry_run"] <= 1.05
    rows = {row["name"]: row for row in results_of([found])["measurements"]}
    assert rows["cells"]["met"] is False and rows["the sum beside the dry run, largest"]["met"] is True
    draw([found], tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 5_000


def test_results_that_are_off_are_not_met():
    off = {"model": "m", "tokens": 1, "way": "w", "formula": 90, "dry_run": 100}
    rows = {row["name"]: row["met"] for row in results_of([off])["measurements"]}
    assert rows["the sum beside the dry run, smallest"] is False


def test_there_are_cells_enough():
    assert sum(len(lengths) for lengths in MODELS.values()) * len(WAYS) >= 24
