"""How a command starts, prints and ends, whatever it does."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cpt.command_line import NO_TELEMETRY, SECONDS_FOR_THE_MAIN_PROCESS, run_app
from cpt.errors import CheckpointError, DataError

heavy = pytest.mark.heavy


def run_python(*words, **environment):
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )


@pytest.mark.parametrize("path", ["file/status.json", "a" * 300, "itself"])
def test_a_path_that_cannot_exist_is_reported_without_a_traceback(
    tmp_path, monkeypatch, capsys, path
):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("itself").symlink_to("itself")
    app = typer.Typer()
    app.command()(lambda: Path(path).read_text())
    with pytest.raises(SystemExit) as ended:
        run_app(app, [])
    assert ended.value.code == 2 and f"ResourceError: {path}:" in capsys.readouterr().err


def save_without_threads() -> CheckpointError:
    problem = CheckpointError("RuntimeError: can't start new thread")
    problem.__cause__ = RuntimeError("can't start new thread")
    return problem


@pytest.mark.parametrize(
    "problem",
    [
        MemoryError(),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        save_without_threads(),
    ],
    ids=["MemoryError", "an import", "torch", "a system call", "a thread of a save"],
)
def test_too_little_memory_is_reported_in_a_line(capsys, monkeypatch, problem):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)

    def command() -> None:
        raise problem

    app = typer.Typer()
    app.command()(command)
    with pytest.raises(SystemExit) as ended:
        run_app(app, [])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith("ResourceError") and error.count("\n") == 1


@heavy
def test_an_output_on_a_full_disk_is_reported_in_a_line():
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "cpt", "--help"]
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert "No space left on device" in ended.stderr and ended.stderr.count("\n") == 1


UNREAD = (
    "import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2);"
    " os.execv({0!r}, [{0!r}, '-c', {1!r}])"
)
PRINTS = """
import sys, typer
from cpt.command_line import run_app
app = typer.Typer()
@app.command()
def command():
    for line in range(10_000):
        print(line), print(line, file=sys.stderr)
    sys.exit(7)
run_app(app, [], outlives_readers={})
"""


@heavy
@pytest.mark.parametrize(("outlives_readers", "code"), [(True, 7), (False, 1)])
def test_only_a_long_command_continues_when_the_reader_of_its_output_is_gone(
    outlives_readers, code
):
    program = UNREAD.format(sys.executable, PRINTS.format(outlives_readers))
    assert run_python("-c", program).returncode == code


@heavy
def test_a_short_command_whose_reader_is_gone_ends_quietly():
    words = ["sh", "-c", f'"{sys.executable}" -m cpt schema | true']
    assert subprocess.run(words, stderr=subprocess.PIPE, check=False).stderr == b""


@heavy
def test_a_character_that_the_terminals_encoding_lacks_is_replaced():
    program = (
        "import typer; from cpt.command_line import run_app; app = typer.Typer();"
        " app.command()(lambda: print('größer → 2')); run_app(app)"
    )
    ended = run_python("-c", program, PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "gr??er ? 2\n", "")


def test_another_process_lets_the_main_one_report_the_mistake_first(capsys, monkeypatch):
    waited = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("cpt.command_line.time.sleep", waited.append)
    app = typer.Typer()

    @app.command()
    def command() -> None:
        raise DataError("a.txt is empty")

    with pytest.raises(SystemExit) as ended:
        run_app(app, [])
    assert waited == [SECONDS_FOR_THE_MAIN_PROCESS]
    assert (
        ended.value.code == 2
        and capsys.readouterr().err == "process 1: DataError: a.txt is empty\n"
    )


@heavy
def test_nothing_is_sent_to_anybody_unless_the_users_environment_asks_for_it(monkeypatch):
    """What the packages make of these variables, in a process of its own: most read them when they are imported."""
    for name in NO_TELEMETRY:
        monkeypatch.delenv(name, raising=False)
    hub = "import cpt.command_line; from huggingface_hub.constants import HF_HUB_DISABLE_TELEMETRY as off; print(off);"
    datasets = "from datasets.config import HF_UPDATE_DOWNLOAD_COUNTS as on; print(on)"
    assert run_python("-c", hub + datasets).stdout == "True\nFalse\n"
    assert run_python("-c", hub, HF_HUB_DISABLE_TELEMETRY="0").stdout == "False\n"


CTRL_C_WHILE_IMPORTING = """
import os, signal, sys


class Interrupted:
    def find_spec(self, name, path, target=None):
        if name == "cpt.cli":
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Interrupted())
signal.signal(signal.SIGINT, signal.default_int_handler)
from cpt.__main__ import main
sys.argv = ["cpt", "--version"]
main()
"""


@heavy
def test_ctrl_c_while_modules_are_imported_ends_the_command_quietly():
    ended = run_python("-c", CTRL_C_WHILE_IMPORTING)
    assert ended.returncode == -signal.SIGINT and ended.stdout == ended.stderr == ""
