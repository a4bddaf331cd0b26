import json
import os
from concurrent.futures import ThreadPoolExecutor

from cpt.runs.events import read_events, record_event, write_waiting_events


def test_an_event_is_a_line_and_a_sentence(tmp_path, caplog):
    record_event(tmp_path, "rolled_back", "Back to checkpoint-4.", step=7, rows=[28, 31])
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["step"], event["rank"], event["rows"]) == ("rolled_back", 7, 0, [28, 31])
    assert "Back to checkpoint-4." in caplog.text


def test_lines_of_several_writers_do_not_mix(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: record_event(tmp_path, "skip", "x" * 5000, step=i), range(200)))
    assert sorted(event["step"] for event in read_events(tmp_path)) == list(range(200))


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path):
    record_event(tmp_path, "hang", "It hangs.")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "restart"})[:-4])
    assert [event["kind"] for event in read_events(tmp_path)] == ["hang"]


def test_a_disk_that_takes_no_line_ends_nothing_and_gets_it_later(tmp_path, caplog):
    run = tmp_path / "not-there"
    record_event(run, "hang", "It hangs.")
    assert "It hangs." in caplog.text and "cannot be written" in caplog.text
    assert not os.path.exists(run) and write_waiting_events(run) == 1
    run.mkdir()
    record_event(run, "restart", "Once more.")
    assert [event["kind"] for event in read_events(run)] == ["hang", "restart"] and write_waiting_events(run) == 0
