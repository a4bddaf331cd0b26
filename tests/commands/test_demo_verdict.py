import json

import pytest
from rich.console import Console

from cpt.commands.demo import print_results, read_result
from cpt.runs.record import Run


def write_run(folder, domain_after, general_after, worked=True):
    """The files of a finished run, as far as the summary reads them."""
    folder.mkdir()
    values = ((0, 1.0), (5, 1.1), (10, general_after))
    evaluations = [
        {"step": step, "tokens": step * 512, "eval_general_bits_per_byte": general} for step, general in values
    ]
    speeds = [
        {"step": step, "tokens": step * 512, "loss": 3.0, "tokens_per_second": speed}
        for step, speed in ((3, 10.0), (6, 30.0), (9, 20.0))
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [evaluations[0], *speeds, *evaluations[1:]])
    )
    sets = [
        {"name": "general-replay", "is_general": True, "before": 1.0, "after": general_after},
        {"name": "domain", "is_general": False, "before": 2.0, "after": domain_after},
    ]
    verdict = {"sets": sets, "tokens": 5120, "worked": worked, "headline": "It worked: so it did."}
    (folder / "verdict.json").write_text(json.dumps(verdict))
    (folder / "status.json").write_text(json.dumps({"state": "finished", "seconds": 30.0}))
    return Run(folder)


def test_a_result_has_the_figures_of_the_verdict_and_the_median_speed(tmp_path):
    row = read_result(write_run(tmp_path / "code-seed1", 1.6, 1.01))
    assert (row.domain_before, row.domain_after, row.general_before, row.general_after) == (2.0, 1.6, 1.0, 1.01)
    assert (row.tokens, row.tokens_per_second, row.seconds) == (5120, 20.0, 30.0)
    assert row.domain_change == pytest.approx(-20)
    assert row.general_change == pytest.approx(1)


@pytest.mark.parametrize(
    ("domain_after", "general_after", "worked", "passed"),
    [
        (1.6, 1.01, True, True),
        (1.69, 0.9, True, True),
        (1.71, 1.0, True, False),
        (1.0, 1.031, True, False),
        (1.0, 1.0, False, False),
    ],
)
def test_it_passes_when_the_domain_falls_clearly_and_by_15_percent_and_general_rises_by_3_at_most(
    tmp_path, domain_after, general_after, worked, passed
):
    assert read_result(write_run(tmp_path / "code-seed1", domain_after, general_after, worked)).passed is passed


def test_one_seed_that_fails_fails_the_demo(tmp_path):
    runs = [write_run(tmp_path / f"code-seed{i}", 1.6, general) for i, general in enumerate((1.0, 1.04))]
    console = Console(record=True, width=80)
    print_results([read_result(run) for run in runs], "It worked: so it did.", console, tmp_path)
    printed = console.export_text()
    for text in ("seed0", "seed1", "-20.0 %", "+4.0 %", "NOT passed", "It worked: so it did.", "verdict.md"):
        assert text in printed
    assert f"  cpt compare {runs[0].folder} {runs[1].folder}\n" in printed
