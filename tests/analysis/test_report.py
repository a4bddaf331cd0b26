import json
import re

import numpy as np
import pytest

from cpt.analysis.page import Curve, Folded, Plot, Table, curves, html_page
from cpt.analysis.report import against_plan, held_out, missing, mixture, report_page, state
from cpt.runs.folder import read_run


def plots(parts):
    return {part.title: part for part in parts if isinstance(part, Plot)}


def rows(parts):
    return [list(row) for part in parts if isinstance(part, Table) for row in part.rows]


def test_a_page_has_every_section_and_asks_for_nothing(run_folder):
    page = report_page(read_run(run_folder))
    for heading in ("Held-out text", "Training", "Mixture", "Events", "Sources", "The record"):
        assert f"<h2>{heading}" in page
    assert "It worked: 10 % fewer bits per byte." in page and "uncommitted" in page
    assert not any(word in page for word in ("<script", "<link", "<img", "src="))


def test_the_verdict_is_part_of_the_page(run_folder):
    table = "| set | change |\n| --- | ---: |\n| <b>x</b> | -10.0 % |\n"
    (run_folder / "verdict.md").write_text(f"# Verdict on code\n\n**It worked.**\n\nThe model.\n\n{table}")
    page = report_page(read_run(run_folder))
    assert "<th>set</th>" in page and "<td>&lt;b&gt;x&lt;/b&gt;</td>" in page and "Verdict on code" not in page


@pytest.mark.parametrize("state", ["running", "failed", "interrupted"])
def test_a_run_in_any_state_has_a_page(run_folder, state):
    (run_folder / "status.json").write_text(json.dumps({"state": state, "step": 5, "steps": 9, "message": "why"}))
    (run_folder / "verdict.json").unlink()
    assert f"{state.capitalize()} after 5 of 9 steps: why" in report_page(read_run(run_folder))


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


def test_held_out_text_is_drawn_over_the_run(run_folder):
    assert list(plots(held_out(read_run(run_folder)))) == [
        "Domain against general text",
        "Bits per byte of held-out text",
    ]


def test_a_mixture_is_compared_with_what_the_recipe_requests(run_folder):
    assert rows(mixture(read_run(run_folder)))[0] == ["code", "75.0 %", "74.0 %", "-1.00 points"]


def test_memory_and_speed_are_compared_with_the_plan(run_folder):
    parts = against_plan(read_run(run_folder))
    assert rows(parts)[0] == ["GPU memory, peak (GiB)", "7", "6.5", "0.93"]
    assert rows(parts)[2] == ["tokens per second", "200", "100", "0.50"]
    (run_folder / "plan.json").unlink()
    assert against_plan(read_run(run_folder)) == []


# --- pages and plots -------------------------------------------------------------------------------------------------


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
