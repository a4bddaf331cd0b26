"""`cpt report`: the page, and how pages are made."""

import html
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from approved import check_approved
from run_folders import write_lines, write_run

from cpt.analysis.page import Curve, Folded, Table, curves, html_page
from cpt.analysis.report import against_plan, missing, report_page
from cpt.runs.folder import read_run

PLAN = {
    "gpu": "NVIDIA H100",
    "gpus": 2,
    "gpu_memory_gib": {"weights": 2.0, "optimizer": 4.0, "activations": 1.0},
    "gpu_total_gib": 7.0,
    "host_total_gib": 3.0,
    "tokens_per_second": 200.0,
    "assumed_mfu": 0.4,
}
EVENTS = [
    {
        "time": "2026-01-02T03:05:00.123+00:00",
        "kind": "nan_skipped",
        "step": 40,
        "message": "Step 40 was skipped.",
    },
    {
        "time": "2026-01-02T03:06:00.123+00:00",
        "kind": "restart",
        "step": None,
        "message": "Starting again.",
    },
]


def log_line(step):
    figures = {
        "loss": 5 - math.log(1 + step),
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "cost": 0.01 * step,
    }
    speed = {
        "tokens_per_second": 100.0,
        "mfu": 0.4,
        "step_seconds_p50": 0.16,
        "step_seconds_p95": 0.2,
    }
    memory = {"gpu_memory_peak_gib": 6.5, "gpu_memory_reserved_gib": 7.0, "host_memory_gib": 3.5}
    sources = {"share_domain": 0.74, "share_general": 0.26, "loss_domain": 4.0, "loss_general": 4.5}
    return {"step": step, "tokens": 16 * step, **figures, **speed, **memory, **sources}


def evaluation_line(step, domain, general):
    bits = {"eval_domain_bits_per_byte": domain, "eval_general_bits_per_byte": general}
    return {"step": step, "tokens": 16 * step, "eval_domain_loss": 3 * domain, **bits}


METRICS = [
    evaluation_line(0, 2.0, 2.0),
    *(log_line(step) for step in range(2, 52, 2)),
    evaluation_line(50, 1.9, 2.2),
    *(log_line(step) for step in range(52, 102, 2)),
    evaluation_line(100, 1.8, 2.1),
    {"step": 50, "tokens": 800, "task_exam_acc": 0.5},
]


def plant(recipe, environment, inputs, status):
    recipe["training"] = {"per_device_train_batch_size": 2}
    recipe["optimizer"]["name"] = "adamw"
    recipe["evaluation"] = {"retain": {"general": None}, "held_out_share": 0.1, "prompts": ["def "]}
    environment["command"] = ["/home/me/cpt/__main__.py", "train", "recipes/my recipe.yaml"]
    environment["hardware"]["gpus"] = ["NVIDIA H100", "NVIDIA H100"]
    environment["git"] |= {"changes": " M cpt/train.py\n", "diff": "-old\n+new\n"}
    inputs["data"]["sources"]["domain"] |= {"held_out": 10, "dropped": {"short": 3}}
    status |= {"step": 100, "steps": 100, "seconds": 61.0, "updated": "2026-01-02T03:10:05+00:00"}


@pytest.fixture
def run_folder(tmp_path):
    """All files that a run can have."""
    folder = write_run(tmp_path / "code", plant)
    for name, content in {
        "plan": PLAN,
        "verdict": {"headline": "It worked: 10 % fewer bits per byte."},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    write_lines(folder / "metrics.jsonl", METRICS)
    write_lines(folder / "events.jsonl", EVENTS)
    return folder


@pytest.fixture
def without_plots(monkeypatch):
    """They take most of a page's time."""
    monkeypatch.setattr("cpt.analysis.report.curves", lambda *_, **__: [])


def text_of(page: str) -> str:
    """What a reader sees, a line for each paragraph and row; a plot by its caption."""
    body = re.sub(r"<svg.*?</svg>", " [plot] ", page.partition("<body>")[2], flags=re.DOTALL)
    for mark, shown in {
        "</dt><dd>": ": ",
        "</(td|th)>\\s*<(td|th)[^>]*>": " | ",
        "<h2>": "\n## ",
    }.items():
        body = re.sub(mark, shown, body)
    body = re.sub(r"<(div|p|tr|section|a|pre|small|/tr|/h2)\b[^>]*>", "\n", body)
    lines = html.unescape(re.sub(r"<[^>]*>", "", body)).splitlines()
    return "\n".join(line.strip() for line in lines if line.strip()) + "\n"


@pytest.mark.heavy
def test_the_page_of_a_finished_run_is_as_approved(run_folder, cpt, tmp_path):
    table = "| set | change |\n| --- | ---: |\n| <b>x</b> | -10.0 % |\n"
    (run_folder / "verdict.md").write_text(
        f"# Verdict on code\n\n**It worked.**\n\nThe model.\n\n{table}"
    )
    assert cpt("report", run_folder, "--output", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert not any(word in page for word in ("<script", "<link", "<img", "src="))
    check_approved(text_of(page), Path(__file__).with_name("approved_report.txt"))


@pytest.mark.parametrize("state", ["running", "failed", "interrupted"])
def test_a_run_in_any_state_has_a_page(run_folder, without_plots, state):
    (run_folder / "status.json").write_text(
        json.dumps({"state": state, "step": 5, "steps": 9, "message": "why"})
    )
    for name in ("verdict.json", "plan.json"):
        (run_folder / name).unlink()
    record = read_run(run_folder)
    assert (
        f"{state.capitalize()} after 5 of 9 steps: why" in report_page(record)
        and against_plan(record) == []
    )


def test_changes_of_the_recipe_are_listed_and_drawn_at_their_tokens(run_folder, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        "cpt.analysis.report.curves",
        lambda title, _, lines, **__: drawn.update({title: lines}) or [],
    )
    change = {"key": "data.sources[code].weight", "kind": "from_step", "before": 1.0, "after": 2.0}
    free = {"key": "checkpoints.archive", "kind": "free", "before": None, "after": "backup"}
    write_lines(
        run_folder / "history.jsonl", [{"step": 40, "note": "more code", "changes": [change, free]}]
    )
    rows = text_of(report_page(read_run(run_folder))).splitlines()
    assert "40 | data.sources[code].weight | 1.0 | 2.0 | from_step | more code" in rows
    assert any(row.startswith("40 | checkpoints.archive | null | backup | free") for row in rows)
    for title in ("Training loss", "grad_norm"):
        assert list(drawn[title][-1].x) == [40 * 16] and not drawn[title][-1].y


@pytest.mark.parametrize("content", ['{"state": "fin', None])
@pytest.mark.parametrize(
    "name", ["recipe.yaml", "status.json", "metrics.jsonl", "verdict.json", "inputs.json"]
)
def test_a_damaged_or_missing_file_is_named_and_the_rest_is_shown(
    run_folder, without_plots, name, content
):
    (run_folder / name).unlink()
    if content is not None:
        (run_folder / name).write_text(content)
    record = read_run(run_folder)
    assert report_page(record) and any(name.partition(".")[0] in line for line in missing(record))


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
