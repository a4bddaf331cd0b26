import json
import re

import numpy as np
import pytest
from chromium_here import open_chromium

from cpt.analysis.page import Code, Facts, Section, Table, html_page
from cpt.analysis.plots import MOST_POINTS, Curve, Plot, curves, intervals
from cpt.analysis.report import (
    against_plan,
    held_out,
    missing,
    mixture,
    report_page,
    scores,
    state,
)
from cpt.errors import ResourceError
from cpt.runs.folder import read_run


def plots(parts):
    return {part.title: part for part in parts if isinstance(part, Plot)}


def rows(parts):
    return [list(row) for part in parts if isinstance(part, Table) for row in part.rows]


def add_line(folder, **figures):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 101, "tokens": 1616, **figures}) + "\n")


def test_a_page_has_every_section_and_asks_for_nothing(run_folder):
    page = report_page(read_run(run_folder))
    for heading in ("Held-out text", "Training", "Mixture", "Events", "Samples", "Training data", "The record"):
        assert f"<h2>{heading}" in page
    assert "It worked: 10 % fewer bits per byte." in page and "uncommitted" in page
    assert not re.findall(r"<(?:script|link|img)\b[^>]*(?:src|href)=", page) and "default-src &#39;none" not in page


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


def test_held_out_text_is_shown_with_intervals_and_outcomes(run_folder):
    parts = held_out(read_run(run_folder))
    assert list(plots(parts)) == [
        "Domain against general text",
        "Change of bits per byte",
        "Bits per byte of held-out text",
    ]
    assert rows(parts) == [
        ["code", "domain", "90", "2.0000", "1.8000", "-10.0", "-11.0 to -9.0", "better"],
        ["prose", "general", "90", "2.0000", "2.1000", "+5.0", "-1.0 to +11.0", "no clear difference"],
    ]


def test_scores_are_shown_with_their_difference_from_the_base(run_folder):
    first, second = rows(scores(read_run(run_folder).verdict))
    assert first == ["code cloze (accuracy)", "100", "0.3", "0.5", "0.402 to 0.598", "+0.100 to +0.300", "better"]
    assert second[-2:] == ["none", "unknown"]


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
    evil = "</script><b onclick=x>\ud800"
    plot = curves(evil, "loss", [Curve(evil, [1, 2], [3, 4])])
    page = html_page(evil, [Section(evil, [evil, Table([evil], [[evil]]), Facts([(evil, evil)]), Code(evil), *plot])])
    assert "<b onclick" not in page


def test_a_page_without_plots_needs_no_plotly(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    assert len(html_page("x", [Section("y", ["z"]), Section("empty", [])])) < 6000
    with pytest.raises(ResourceError, match="cpt\\[report\\]"):
        html_page("x", [Section("y", curves("a", "b", [Curve("c", [1], [2])]))])


def test_a_long_curve_is_thinned_and_keeps_its_spikes():
    values = np.zeros(100_000)
    values[54_321] = 7
    (plot,) = curves("x", "y", [Curve("z", np.arange(100_000), values)])
    assert len(plot.traces[0]["x"]) <= MOST_POINTS and plot.traces[0]["y"].max() == 7
    assert curves("x", "y", [Curve("z", [1.0], [np.nan])]) == [] == intervals("x", "y", [])


@pytest.mark.browser
def test_a_browser_draws_every_plot_without_network(run_folder, tmp_path):
    (tmp_path / "page.html").write_text(report_page(read_run(run_folder)))
    asked, problems = [], []
    with open_chromium() as browser:
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda problem: problems.append(str(problem)))
        page.goto(f"file://{tmp_path}/page.html")
        drawn = page.locator("figure .main-svg").count()
        assert page.locator("figure").count() <= drawn and problems == []
    assert asked == [f"file://{tmp_path}/page.html"]
