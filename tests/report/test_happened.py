from dataclasses import replace

from cpt.report.happened import FIRST, LAST, events, marks


def test_each_event_is_a_row_in_the_order_of_time(record):
    summary, table = events(record).parts
    assert summary == "2 in all: nan_skipped 1, restart 1."
    assert table.rows[0] == (
        "2026-01-02 03:05:00",
        "40",
        "nan_skipped",
        "Step 40 was skipped: its loss is not a number.",
    )
    assert table.rows[1][1] == ""


def test_an_event_with_a_step_is_a_mark_on_the_axis_of_tokens(record):
    assert marks(record) == [(640, "step 40, nan_skipped: Step 40 was skipped: its loss is not a number.")]


def test_of_thousands_of_events_the_first_and_the_last_are_shown(record):
    many = replace(record, events=[{"kind": "skip", "step": number, "message": "m" * 500} for number in range(5000)])
    summary, table = events(many).parts
    assert "4,800 in the middle" in summary and len(table.rows) == FIRST + LAST and table.rows[-1][1] == "4,999"
    assert len(marks(many)) == 5000 and len(marks(many)[0][1]) < 160


def test_events_of_no_known_form_are_survived(record):
    odd = replace(record, events=[{}, {"kind": 3, "step": "x", "message": None, "time": []}])
    assert list(events(odd).parts[1].rows) == [("", "", "unknown", "")] * 2 and marks(odd) == []


def test_without_events_there_is_no_section(lone_record):
    assert events(lone_record).parts == []
