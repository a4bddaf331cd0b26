from dataclasses import replace

from cpt.report.against_plan import against_plan
from cpt.report.record import read_record


def test_the_planned_parts_stand_on_each_other_beside_the_measured_peak(record):
    bars, table, assumed = against_plan(record).parts
    assert bars.stacked and bars.series["optimizer"] == [4.0, None] and bars.series["measured peak"] == [None, 6.5]
    assert table.rows[0] == ("GPU memory, peak (GiB)", "7", "6.5", "0.93")
    assert bars.note.endswith("the update.") and "40.0 %" in assumed
    assert [row[0] for row in table.rows] == [
        "GPU memory, peak (GiB)",
        "host memory (GiB)",
        "tokens per second",
        "time in training steps (s)",
    ]


def test_a_run_without_a_plan_says_so(record):
    text, table = against_plan(replace(record, plan={})).parts
    assert "holds no plan" in text and table.rows[0] == ("GPU memory, peak (GiB)", "", "6.5", "")


def test_a_run_whose_memory_was_not_measured_says_so(run_folder):
    (run_folder / "metrics.jsonl").write_text('{"step": 1, "tokens": 16, "loss": 1, "tokens_per_second": 100}\n')
    text, table, _ = against_plan(read_record(run_folder)).parts
    assert "was not measured" in text and table.rows[0] == ("GPU memory, peak (GiB)", "7", "", "")


def test_neither_plan_nor_gpu_is_no_section(lone_record):
    assert against_plan(lone_record).parts == []


def test_a_plan_of_no_known_form_is_survived(record):
    odd = replace(
        record, plan={"gpu_memory_gib": [1], "gpu_total_gib": "x", "tokens_per_second": None, "assumed_mfu": []}
    )
    assert against_plan(odd).parts[-1].rows[0][:2] == ("GPU memory, peak (GiB)", "")
