from run_folders import ENVIRONMENT, write_lines, write_run

from cpt.compare.costs import event_topic, progress_topic, speed_topic, told_seconds
from cpt.compare.record import read_record


def records(*folders):
    return [read_record(folder, folder.name) for folder in folders]


def rows(topic):
    return {row.name: row.values for row in topic.rows}


def test_speed_is_a_median_and_memory_a_maximum(tmp_path):
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second")
    lines = [
        {"step": n, "tokens": n, "tokens_per_second": 2000.0, "gpu_memory_peak_gib": n, "mfu": 0.5} for n in (1, 3, 2)
    ]
    write_lines(second / "metrics.jsonl", lines)
    found = rows(speed_topic(records(first, second)))
    assert found["tokens/s"] == ("1,010", "2,000 (+97.9%)")
    assert found["GPU memory, peak (GiB)"] == (None, "3.00") and found["MFU (%)"] == (None, "50.0")


def test_progress_tells_state_steps_tokens_time_and_starts(tmp_path):
    first, second = (
        write_run(tmp_path / "first"),
        write_run(tmp_path / "second", lambda status, **others: status.update(seconds="x")),
    )
    write_lines(second / "starts.jsonl", [ENVIRONMENT])
    found = rows(progress_topic(records(first, second)))
    assert (
        found["steps"] == ("20", "20")
        and found["time of the last start"] == ("12.5 s", None)
        and found["starts"] == ("1", "2")
    )


def test_events_are_counted_by_kind(tmp_path):
    first, second = write_run(tmp_path / "first"), write_run(tmp_path / "second")
    write_lines(second / "events.jsonl", [{"kind": "restart"}, {"kind": "restart"}, {"kind": ["odd"]}, {}])
    assert rows(event_topic(records(first, second))) == {"['odd']": ("0", "1"), "restart": ("0", "2")}


def test_times_are_told_in_two_units():
    assert [told_seconds(seconds) for seconds in (5.04, 200, 7500, 200_000)] == [
        "5.0 s",
        "3 min 20 s",
        "2 h 5 min",
        "2 d 7 h",
    ]
