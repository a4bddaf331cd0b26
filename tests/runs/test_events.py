"""What a run writes line by line, events above all, and the heartbeats of its processes."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from full_disk import disk_of_its_own, files_end_at, fill

from cpt.distributed import report_fallback
from cpt.files import LinesFile, append
from cpt.runs.events import (
    LastHeartbeat,
    logged_events,
    pids_here,
    read_events,
    read_heartbeats,
    record_event,
    remove_heartbeats,
    write_heartbeat,
    write_waiting_events,
)
from cpt.runs.folder import keep_lines_until


def test_lines_of_several_writers_do_not_mix(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: record_event(tmp_path, "skip", "x" * 5000, step=i), range(200)))
    assert sorted(event["step"] for event in read_events(tmp_path)) == list(range(200))


def test_an_event_that_cannot_be_written_ends_nothing_and_is_written_later(tmp_path):
    run = tmp_path / "not-there"
    record_event(run, "hang", "It hangs.")
    assert not run.exists() and write_waiting_events(run) == 1
    run.mkdir()
    record_event(run, "restart", "Once more.")
    assert [event["kind"] for event in read_events(run)] == [
        "hang",
        "restart",
    ] and write_waiting_events(run) == 0


def test_a_fallback_is_an_event_of_the_run_with_key_value_and_reason(tmp_path):
    with logged_events(tmp_path):
        report_fallback("training.torch_compile", False, "no C compiler")
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["key"], event["value"]) == (
        "fallback",
        "training.torch_compile",
        False,
    )
    assert event["reason"] == "no C compiler" and "no C compiler" in event["message"]


# --- lines on a full disk --------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    with disk_of_its_own(tmp_path / "disk", "256k") as folder:
        yield folder


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def line(step):
    return json.dumps({"step": step, "text": "x" * 300})


def test_lines_for_which_there_is_no_room_wait_and_are_written_in_their_order(disk):
    lines = LinesFile(disk / "lines.jsonl")
    lines.add(line(0))
    ballast = fill(disk)
    for step in range(1, 30):  # the first ones still fit into the file's last block
        lines.add(line(step))
    written = steps(lines.path)
    assert len(written) < 30 and lines.write_waiting() == 30 - len(written)
    ballast.unlink()
    lines.add(line(30))
    assert steps(lines.path) == list(range(31)) and not lines.waiting


def test_a_line_that_fits_in_part_leaves_nothing_of_itself(tmp_path):
    append(tmp_path / "lines", "whole\n")
    with files_end_at(10), pytest.raises(OSError, match="No space left"):
        append(tmp_path / "lines", "too long for the disk\n")
    assert (tmp_path / "lines").read_text() == "whole\n"


def test_the_lines_of_steps_that_are_trained_again_are_removed_on_a_full_disk_too(disk):
    path = disk / "metrics.jsonl"
    path.write_text("".join(f"{line(step)}\n" for step in range(40)) + '{"step": 40, "lo')
    fill(disk)
    keep_lines_until(path, 20)
    assert steps(path) == list(range(21))
    keep_lines_until(path, -1)
    assert path.read_text() == ""


# --- heartbeats ------------------------------------------------------------------------------------------------------


def heartbeat(rank, pid=1, host="h"):
    return LastHeartbeat(rank, pid, host, phase="training", step=3, beats=4, seconds_per_step=2.0)


def test_heartbeats_come_back_by_rank_without_those_of_a_crash_or_another_version(tmp_path):
    for rank in (10, 2):
        write_heartbeat(tmp_path, heartbeat(rank))
    (tmp_path / "heartbeats" / "rank-1.json").write_text(json.dumps({"rank": 1, "other": 2}))
    (tmp_path / "heartbeats" / "rank-3.json").write_text("{")
    assert read_heartbeats(tmp_path) == [heartbeat(2), heartbeat(10)]
    remove_heartbeats(tmp_path)
    assert list((tmp_path / "heartbeats").iterdir()) == []


def test_only_processes_of_this_host_can_be_signalled(tmp_path):
    for rank, host in enumerate((socket.gethostname(), "another", "another")):
        write_heartbeat(tmp_path, heartbeat(rank, pid=10 + rank, host=host))
    assert pids_here(tmp_path) == [10]
