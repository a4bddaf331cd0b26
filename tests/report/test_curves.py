import json
from dataclasses import replace

import numpy as np

from cpt.report.curves import MOST_OTHERS, smoothed, speed, stage_figures, training
from cpt.report.record import read_record


def plots(section):
    return {part.title: part for part in section.parts if not isinstance(part, str)}


def with_lines(run_folder, lines):
    (run_folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return read_record(run_folder)


def test_the_loss_is_pale_behind_the_smoothed_one_with_the_events_on_it(record):
    loss = plots(training(record))["Training loss"]
    assert [(curve.name, curve.faint) for curve in loss.curves] == [("loss", True), ("smoothed", False)]
    assert [x for x, _ in loss.marks] == [40 * 16]


def test_each_source_has_its_loss_and_each_figure_of_the_hardware_its_plot(record):
    assert [curve.name for curve in plots(training(record))["Training loss of each source"].curves] == [
        "code",
        "prose",
    ]
    drawn = plots(speed(record))
    assert set(drawn) == {
        "Tokens per second",
        "Model FLOPs utilisation",
        "Waiting for data",
        "Time of a step",
        "GPU memory",
        "Host memory",
    }
    assert drawn["Model FLOPs utilisation"].curves[0].y[0] == 40 and all(plot.from_zero for plot in drawn.values())


def test_a_run_that_logged_no_smoothed_loss_gets_one_and_the_page_says_so(run_folder):
    record = with_lines(run_folder, [{"step": n, "tokens": n, "loss": n % 2} for n in range(200)])
    loss = plots(training(record))["Training loss"]
    assert len(loss.curves) == 2 and loss.note.startswith("Smoothed for this page")
    assert abs(loss.curves[1].y[100] - 0.5) < 0.11


def test_a_few_lines_are_not_smoothed(run_folder):
    record = with_lines(run_folder, [{"step": n, "tokens": n, "loss": 1} for n in range(5)])
    assert [curve.faint for curve in plots(training(record))["Training loss"].curves] == [False]


def test_the_moving_mean_keeps_a_line_a_line_but_for_its_ends():
    values = np.arange(1000.0)
    assert np.allclose(smoothed(values)[20:-20], values[20:-20])


def test_figures_of_other_stages_are_drawn_by_family(run_folder):
    line = {
        "rewards/chosen": 1,
        "rewards/margins": 2,
        "rewards/accuracies": 0.5,
        "kl": 0.1,
        "epoch": 1,
        "share_x": 1,
        "num_tokens": 9,
    }
    record = with_lines(run_folder, [{"step": n, "tokens": n, **line} for n in range(3)])
    drawn = plots(stage_figures(record))
    assert set(drawn) == {"rewards", "rewards/accuracies", "kl"}
    assert [curve.name for curve in drawn["rewards"].curves] == ["chosen", "margins"]


def test_figures_of_a_documents_stage_are_not_drawn_twice(record):
    assert stage_figures(record).parts == []


def test_a_flood_of_unknown_figures_is_cut_off_and_the_page_says_so(run_folder):
    record = with_lines(
        run_folder, [{"step": n, "tokens": n, **{f"figure {k}": k for k in range(40)}} for n in range(2)]
    )
    parts = stage_figures(record).parts
    assert len(parts) == MOST_OTHERS + 1 and parts[-1].startswith("Not drawn: figure 24, ")


def test_without_metrics_there_is_no_section(lone_record):
    assert (
        not training(lone_record).parts
        and not speed(lone_record).parts
        and not stage_figures(replace(lone_record, events=[{"step": 1}])).parts
    )
