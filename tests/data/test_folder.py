import errno
import fcntl
import multiprocessing
import signal
import subprocess
import sys
import time

from cpt.cache import publish_once

SLOW_FILL = """
import sys, time
from pathlib import Path
from cpt.cache import publish_once
def fill(folder):
    (folder / "half").write_text("half")
    print("filling", flush=True)
    time.sleep(60)
publish_once(Path(sys.argv[1]), fill)
"""


def write_a_file(folder):
    (folder / "content").write_text("all")


def test_a_killed_process_leaves_nothing_that_looks_complete(tmp_path):
    folder = tmp_path / "a"
    process = subprocess.Popen([sys.executable, "-c", SLOW_FILL, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "filling\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not folder.exists()
    publish_once(folder, write_a_file)
    assert (folder / "content").read_text() == "all" and not (folder / "half").exists()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["a"]


def fill_slowly(root, filled):
    def fill(folder):
        with filled.get_lock():
            filled.value += 1
        time.sleep(0.2)
        write_a_file(folder)

    publish_once(root / "a", fill)
    assert (root / "a" / "content").exists()


def test_several_processes_fill_a_store_once(tmp_path):
    context = multiprocessing.get_context("fork")
    filled = context.Value("i", 0)
    processes = [context.Process(target=fill_slowly, args=(tmp_path, filled)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert filled.value == 1


def test_without_locks_two_machines_fill_a_folder_each_and_the_first_stays(tmp_path, monkeypatch):
    """As on a file system whose locks do not reach other machines, or that has none."""

    def no_lock(*_):
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(fcntl, "flock", no_lock)

    def slow(folder):
        (folder / "content").write_text("first half, ")
        monkeypatch.setattr("cpt.cache.machine", lambda: "other")
        publish_once(tmp_path / "a", lambda other: (other / "content").write_text("all of the other"))
        with (folder / "content").open("a") as file:
            file.write("second half")

    publish_once(tmp_path / "a", slow)
    assert (tmp_path / "a" / "content").read_text() == "all of the other"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["a"]
