"""The slow disk of the suite."""

import os
import subprocess
import sys
import time

from benchmarks.faults.slow_disk import BYTES_PER_SECOND, Operation, Watched, operations, slowed

PROGRAM = """
import os, sys
folder, size = sys.argv[1], int(sys.argv[2])
with open(f"{folder}/checkpoint-1.part", "wb", buffering=0) as file:
    file.write(bytes(size)); os.fsync(file.fileno())
os.rename(f"{folder}/checkpoint-1.part", f"{folder}/checkpoint-1.done")
"""


def test_writes_syncs_and_renames_of_one_folder_take_their_time_and_are_told(tmp_path):
    log, slow, quick = tmp_path / "log", tmp_path / "runs", tmp_path / "elsewhere"
    environment = {**os.environ, **slowed(tmp_path, slow, log)}
    seconds = {}
    for folder in (slow, quick):
        folder.mkdir()
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder), str(int(BYTES_PER_SECOND))], env=environment, check=True
        )
        seconds[folder] = time.monotonic() - began
    assert seconds[slow] > seconds[quick] + 1
    assert [(one.what, one.ended is not None) for one in operations(log)] == [
        ("write", True),
        ("sync", True),
        ("rename", True),
    ]


def test_an_operation_that_was_killed_has_no_end(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "5.0 1 begin write /runs/checkpoint-2/a\n6.0 1 end write /runs/checkpoint-2/a\n6.5 1 begin sync"
        " /runs/checkpoint-2/a\n"
    )
    assert [(one.what, one.ended) for one in operations(log)] == [("write", 6.0), ("sync", None)]
    assert [one.what for one in operations(log, after=6.2)] == ["sync"]


def test_a_growing_log_gives_each_beginning_once_and_waits_for_the_end_of_a_line(tmp_path):
    log = tmp_path / "log"
    watched = Watched(log)
    assert watched.look() == []
    log.write_text("5.0 1 begin write /runs/checkpoint-2/a\n5.5 1 begin wr")
    assert watched.look() == [Operation(5.0, None, "write", "/runs/checkpoint-2/a")]
    with log.open("a") as file:
        file.write("ite /runs/checkpoint-2/b\n6.0 1 end write /runs/checkpoint-2/a\n")
    assert watched.look() == [Operation(5.5, None, "write", "/runs/checkpoint-2/b")] and watched.look() == []
    assert [(one.began, one.ended) for one in watched.operations()] == [(5.0, 6.0), (5.5, None)]
