import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from cpt.command_line import NO_TELEMETRY, run_app, show_log
from cpt.errors import DataError


def failing(message):
    app = typer.Typer()

    @app.command()
    def command() -> None:
        raise DataError(message)

    return app


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("file/status.json", "Not a directory"),
        ("a" * 300, "File name too long"),
        ("itself", "Too many levels of symbolic links"),
    ],
)
def test_a_path_that_can_name_nothing_is_told_without_a_traceback(tmp_path, monkeypatch, capsys, path, said):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("itself").symlink_to("itself")
    app = typer.Typer()
    app.command()(lambda: Path(path).read_text())
    with pytest.raises(SystemExit) as ended:
        run_app(app, [])
    assert ended.value.code == 2 and f"ResourceError: {path}: {said}." in capsys.readouterr().err


def test_an_output_on_a_full_disk_is_told_in_a_line():
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "cpt", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 2
    assert ended.stderr.startswith("ResourceError: a file or the output: No space left on device.")
    assert ended.stderr.count("\n") == 1


NOBODY_READS = (
    "import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1); os.dup2(w, 2); os.execv({0!r}, [{0!r}, *{1!r}])"
)


def run_unread(*words):
    """Both outputs are a pipe whose reader is gone."""
    program = NOBODY_READS.format(sys.executable, words)
    return subprocess.run([sys.executable, "-c", program], check=False).returncode


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


@pytest.mark.parametrize(("outlives_readers", "code"), [(True, 7), (False, 1)])
def test_a_long_command_ends_as_usual_where_nobody_reads_it_and_a_short_one_at_once(outlives_readers, code):
    assert run_unread("-c", PRINTS.format(outlives_readers)) == code
    assert run_unread("-u", "-c", PRINTS.format(outlives_readers)) == code


@pytest.mark.parametrize("words", ["schema", "--help"])
def test_a_short_command_whose_reader_is_gone_ends_quietly(words):
    ended = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m cpt {words} | true'], stderr=subprocess.PIPE, text=True, check=False
    )
    assert ended.stderr == ""


def test_what_the_terminal_s_encoding_lacks_ends_nothing():
    program = (
        "import typer; from cpt.command_line import run_app; app = typer.Typer(); app.command()(lambda: print('größer"
        " → 2')); run_app(app)"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"gr??er ? 2\n", b"")


def test_another_process_lets_the_main_one_speak_first(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("cpt.command_line.SECONDS_FOR_THE_MAIN_PROCESS", 0.2)
    begun = time.perf_counter()
    with pytest.raises(SystemExit) as ended:
        run_app(failing("a.txt is empty"), [])
    assert time.perf_counter() - begun >= 0.2
    assert ended.value.code == 2 and capsys.readouterr().err == "process 1: DataError: a.txt is empty\n"


def test_information_is_shown_once_and_warnings_always(capsys):
    show_log()
    log = logging.getLogger("cpt")
    for _ in range(2):
        log.info("domain: 12 documents")
        log.warning("a file is missing")
    assert capsys.readouterr().out == "domain: 12 documents\na file is missing\na file is missing\n"


@pytest.mark.parametrize("asked", [False, True])
def test_nothing_is_sent_to_anybody_unless_the_environment_asks_for_it(asked):
    """What the packages make of these variables, in a process of its own: most read them when they are imported."""
    program = (
        "import cpt.command_line; from huggingface_hub import constants; from datasets import config;"
        "print(constants.HF_HUB_DISABLE_TELEMETRY, config.HF_UPDATE_DOWNLOAD_COUNTS)"
    )
    own = {"HF_HUB_DISABLE_TELEMETRY": "0", "HF_UPDATE_DOWNLOAD_COUNTS": "1"} if asked else {}
    environment = {name: value for name, value in os.environ.items() if name not in NO_TELEMETRY} | own
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert said.split() == (["False", "True"] if asked else ["True", "False"])
