import json
import os

import psutil
import pytest

from cpt.errors import LaunchError
from cpt.rehearsal.starting import Launch, ended_as, resident_bytes, run_part
from cpt.rehearsal.watching import MOMENTS


def run(tmp_path, launcher, part="longest_rows"):
    return run_part(part, tmp_path / "recipe.yaml", tmp_path / "run", tmp_path, Launch(1, launcher))


def test_a_process_that_was_killed_is_told_from_one_that_failed(tmp_path):
    killed = run(tmp_path, "sh -c 'kill -9 $$'")
    assert killed.was_killed and not killed.is_done and killed.failure is None
    ended = run(tmp_path, "sh -c 'exit 3'", part="resumed")
    assert (ended.code, ended.was_killed, ended.is_done) == (3, False, False)


@pytest.mark.parametrize(
    "said", ["Signal 9 (SIGKILL) received by PID 7", "exits with return code = -9", "died with SIGKILL: 9"]
)
def test_launchers_say_it_in_ways_of_their_own(tmp_path, said):
    log = tmp_path / "log"
    log.write_text(f"...\n{said}\n")
    assert ended_as(1, None, 0, tmp_path, log).was_killed
    assert not ended_as(0, None, 0, tmp_path, log).was_killed


def test_what_it_printed_is_in_its_log(tmp_path):
    assert "hello" in run(tmp_path, "sh -c 'echo hello'").log.read_text()


def test_a_launcher_that_is_not_there_is_named(tmp_path):
    with pytest.raises(LaunchError, match="acelerate cannot be started"):
        run(tmp_path, "acelerate launch")


def test_of_several_processes_the_first_that_failed_has_the_word(tmp_path):
    for rank, (error, time) in enumerate({"RuntimeError": 2.0, "ValueError": 1.0}.items()):
        content = {"rank": rank, "error": error, "message": "", "is_expected": False, "place": None, "time": time}
        (tmp_path / f"failed-{rank}-1.json").write_text(json.dumps(content))
        memory = {"host": 100, "allocated": 10 * rank, "reserved": 20 * rank, "of_gpu": 80}
        (tmp_path / f"memory-{rank}.json").write_text(json.dumps(memory))
    (tmp_path / "log").write_text("")
    ended = ended_as(1, None, 150, tmp_path, tmp_path / "log")
    assert ended.failure is not None and ended.failure.error == "ValueError"
    assert (ended.memory.host, ended.memory.allocated, ended.memory.reserved) == (200, 10, 20)


def test_how_long_something_took_is_known_from_the_moment_before_it(tmp_path):
    moments = [("step begins", 0, 1.0), ("step ends", 1, 3.5), ("saved", 1, 4.0)]
    lines = [json.dumps({"what": what, "step": step, "time": time}) for what, step, time in moments]
    (tmp_path / MOMENTS).write_text("\n".join(lines))
    (tmp_path / "log").write_text("")
    ended = ended_as(0, None, 0, tmp_path, tmp_path / "log")
    assert (
        ended.seconds_before("step ends", 1),
        ended.seconds_before("saved", 1),
        ended.seconds_before("saved", 2),
    ) == (2.5, 0.5, None)


def test_memory_is_that_of_the_whole_family():
    assert resident_bytes(os.getpid()) >= psutil.Process().memory_info().rss // 2
    assert resident_bytes(2**22 + 1) == 0
