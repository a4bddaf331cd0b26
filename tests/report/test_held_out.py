import json
from dataclasses import replace

import pytest

from cpt.report.held_out import held_out
from cpt.report.record import read_record
from cpt.runs.page import Table
from cpt.runs.plots import Intervals, Plot


def titled(section):
    return {part.title: part for part in section.parts if isinstance(part, Plot | Intervals)}


def test_the_first_plot_is_domain_over_general_from_before_to_after(record):
    section = held_out(record)
    frontier = section.parts[0]
    way, before, after = frontier.curves
    assert (section.title, frontier.title) == ("What was gained, and what it cost", "Domain against general text")
    assert (list(way.x), list(way.y)) == ([2.0, 2.2, 2.1], [2.0, 1.9, 1.8])
    assert (before.name, after.name) == ("before", "after 1,600 tokens") and after.hover[0].endswith(
        "general 2.1000, domain 1.8000"
    )


def test_differences_come_with_their_intervals_in_percent(record):
    rows = titled(held_out(record))["Change of bits per byte"].rows
    assert [row[0] for row in rows] == ["code", "prose"] and rows[0][1:] == pytest.approx((-10, -11, -9))


def test_each_set_runs_beside_what_it_was_before(record):
    curves = titled(held_out(record))["Bits per byte of held-out text"].curves
    assert [(curve.name, curve.faint) for curve in curves][:2] == [("code, before", True), ("code", False)]
    assert list(curves[0].y) == [2.0, 2.0]


def test_the_table_judges_each_set_by_its_interval(record):
    table = next(part for part in held_out(record).parts if isinstance(part, Table))
    assert table.rows[0] == ("code", "domain", "90", "2.0000", "1.8000", "-10.0 %", "-11.0 to -9.0 %", "better")
    assert table.rows[1][1] == "general" and table.rows[1][-1] == "no clear difference"


def test_without_a_verdict_the_evaluations_alone_are_told(record):
    section = held_out(replace(record, verdict={}))
    table = next(part for part in section.parts if isinstance(part, Table))
    assert "Change of bits per byte" not in titled(section)
    assert table.rows[0] == ("code", "domain", "", "2.0000", "1.8000", "-10.0 %", "none", "not known")


def test_without_a_general_set_there_is_no_frontier(record):
    section = held_out(replace(record, recipe={}))
    assert section.title == "Held-out text" and "Domain against general text" not in titled(section)


def test_why_a_run_stopped_before_its_budget_is_told(record):
    stopped = replace(record, verdict={**record.verdict, "stopped": "stopped at step 50: too much was forgotten"})
    assert held_out(stopped).parts[-1] == "The run stopped at step 50: too much was forgotten."


def test_of_examples_the_loss_and_how_often_the_better_answer_wins_are_drawn(run_folder):
    lines = [
        {"step": n, "tokens": n, "eval_chat_loss": 1 / (1 + n), "eval_chat_rewards/accuracies": 0.5} for n in range(3)
    ]
    (run_folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    drawn = titled(held_out(replace(read_record(run_folder), verdict={})))
    assert list(drawn) == ["Loss of held-out examples", "Held-out examples: rewards/accuracies"]


def test_a_run_that_was_never_evaluated_has_no_section(lone_record):
    assert held_out(lone_record).parts == []
