"""`cpt report`: the page, and how pages are made."""

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
from approved import check_approved

from cpt.analysis.page import Curve, Folded, Table, curves, html_page
from cpt.analysis.report import against_plan, missing, report_page, state
from cpt.runs.folder import read_run


def text_of(page: str) -> str:
    """What a reader sees, a line for each paragraph and row; a plot by its caption."""
    body = re.sub(r"<svg.*?</svg>", " [plot] ", page.partition("<body>")[2], flags=re.DOTALL)
    for mark, shown in {"</dt><dd>": ": ", "</(td|th)>\\s*<(td|th)[^>]*>": " | ", "<h2>": "\n## "}.items():
        body = re.sub(mark, shown, body)
    body = re.sub(r"<(div|p|tr|section|a|pre|small|/tr|/h2)\b[^>]*>", "\n", body)
    lines = html.unescape(re.sub(r"<[^>]*>", "", body)).splitlines()
    return "\n".join(line.strip() for line in lines if line.strip()) + "\n"


def test_the_page_of_a_finished_run_is_as_approved(run_folder):
    table = "| set | change |\n| --- | ---: |\n| <b>x</b> | -10.0 % |\n"
    (run_folder / "verdict.md").write_text(f"# Verdict on code\n\n**It worked.**\n\nThe model.\n\n{table}")
    page = report_page(read_run(run_folder))
    assert not any(word in page for word in ("<script", "<link", "<img", "src="))
    check_approved(text_of(page), Path(__file__).with_name("approved_report.txt"))


@pytest.mark.parametrize("state", ["running", "failed", "interrupted"])
def test_a_run_in_any_state_has_a_page(run_folder, state):
    (run_folder / "status.json").write_text(json.dumps({"state": state, "step": 5, "steps": 9, "message": "why"}))
    for name in ("verdict.json", "plan.json"):
        (run_folder / name).unlink()
    record = read_run(run_folder)
    assert f"{state.capitalize()} after 5 of 9 steps: why" in report_page(record) and against_plan(record) == []


def test_a_run_that_has_only_its_recipe_has_a_page_that_says_so(run_folder):
    for path in [*run_folder.glob("*.json"), *run_folder.glob("*.jsonl")]:
        path.unlink()
    record = read_run(run_folder)
    assert report_page(record) and state(record) == "Unknown."
    assert sum(".json" in line for line in missing(record)) == 4


@pytest.mark.parametrize("name", ["recipe.yaml", "status.json", "metrics.jsonl", "verdict.json", "inputs.json"])
def test_a_damaged_file_is_named_and_the_rest_is_shown(run_folder, name):
    (run_folder / name).write_text('{"state": "fin')
    record = read_run(run_folder)
    assert report_page(record) and any(name in line for line in missing(record))


def test_text_stays_text_whatever_it_holds():
    evil = "</script><b onclick=x>\ud800\0$_a"
    parts = [evil, Table([evil], [[evil]]), {evil: evil}, Folded(evil, evil)]
    plot = curves(evil, evil, [Curve(evil, [1, 2], [3, 4]), Curve(f"_{evil}", [1], [2])])
    assert "<b onclick" not in html_page(evil, {evil: [*parts, *plot]})


def test_a_long_curve_becomes_small_and_keeps_its_spikes():
    values = np.random.default_rng(0).random(100_000)
    values[54_321] = 70
    (plot,) = curves("x", "y", [Curve("z", np.arange(1e5), values)])
    line = max(re.findall(r'd="([^"]*)"', plot.svg), key=len)
    heights = sorted(float(y) for y in re.findall(r"[ML] \S+ (\S+)", line))  # from the top
    assert len(plot.svg) < 200_000 and heights[0] < 20 and heights[1] > 180
    assert curves("x", "y", [Curve("z", [], [])]) == []
