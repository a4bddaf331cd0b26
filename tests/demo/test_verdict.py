import json

import pytest
from rich.console import Console

from cpt.demo.verdict import Row, show, summarize, worst, write_summary
from cpt.runs.record import Run


def write_run(folder, domain_after, general_after):
    """The files of a finished run, as far as the verdict reads them."""
    folder.mkdir()
    evaluations = [
        {"step": step, "tokens": step * 512, "eval_domain_bits_per_byte": domain, "eval_general_bits_per_byte": general}
        for step, domain, general in ((0, 2.0, 1.0), (5, 1.9, 1.0), (10, domain_after, general_after))
    ]
    speeds = [
        {"step": step, "tokens": step * 512, "loss": 3.0, "tokens_per_second": speed} for step, speed in ((3, 10.0), (6, 30.0), (9, 20.0))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [evaluations[0], *speeds, *evaluations[1:]]))
    samples = [{"step": step, "prompt": "def [x]", "continuation": text} for step, text in ((0, " old"), (10, " new"))]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    (folder / "status.json").write_text(json.dumps({"state": "finished", "seconds": 30.0}))
    return Run(folder)


@pytest.fixture
def base(tmp_path):
    return write_run(tmp_path / "base", 2.0, 1.0)


def test_a_row_compares_the_first_with_the_last_evaluation_at_the_median_speed(tmp_path, base):
    row = summarize(base, [write_run(tmp_path / "demo-seed1", 1.6, 1.01)]).rows[0]
    assert (row.domain_before, row.domain_after, row.general_before, row.general_after) == (2.0, 1.6, 1.0, 1.01)
    assert (row.tokens, row.tokens_per_second, row.seconds) == (5120, 20.0, 30.0)
    assert row.domain_change == pytest.approx(-20)
    assert row.general_change == pytest.approx(1)


@pytest.mark.parametrize(
    ("domain_after", "general_after", "passed"),
    [(1.6, 1.01, True), (1.69, 0.9, True), (1.71, 1.0, False), (1.0, 1.021, False)],
)
def test_it_passes_when_the_domain_falls_by_15_percent_and_general_rises_by_2_at_most(tmp_path, base, domain_after, general_after, passed):
    assert summarize(base, [write_run(tmp_path / "demo-seed1", domain_after, general_after)]).passed is passed


def test_one_seed_that_fails_fails_the_demo(tmp_path, base):
    runs = [write_run(tmp_path / f"demo-seed{i}", 1.6, general) for i, general in enumerate((1.0, 1.03, 1.01))]
    assert not summarize(base, runs).passed


def test_the_worst_row_takes_each_figure_from_the_run_where_it_is_worst():
    row = worst([Row("a", 2.0, 1.5, 1.0, 1.01, 512, 20.0, 5.0), Row("b", 2.0, 1.6, 1.0, 0.99, 512, 10.0, 6.0)])
    assert (row.domain_after, row.general_after, row.tokens_per_second, row.seconds) == (1.6, 1.01, 10.0, 6.0)


def test_the_summary_is_saved_for_programs_and_people_and_shown(tmp_path, base):
    summary = summarize(base, [write_run(tmp_path / f"demo-seed{i}", 1.6, 1.01) for i in (1, 2)])
    write_summary(summary, tmp_path)
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert saved["passed"] is True
    assert saved["changes"][0]["domain_change_percent"] == pytest.approx(-20)
    console = Console(record=True, width=80)
    show(summary, console, tmp_path)
    for text in (console.export_text(), (tmp_path / "summary.md").read_text()):
        for figure in ("seed1", "seed2", "worst", "-20.0 %", "+1.0 %", "def [x] old", "def [x] new", "Passed", "final"):
            assert figure in text
