"""How numbers are written, and what a terminal, a pipe and a file get."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

from cpt.formatting import format_bytes, format_duration, format_number

PRINTS = """
import cpt.command_line
from cpt.formatting import open_console
from rich.progress import Progress
from rich.table import Table
from tqdm import tqdm
console = open_console()
console.print("It worked.", style="bold green")
table = Table("what", "where")
table.add_row("a run", "/a/long/path/" + "x" * 90)
console.print(table)
with Progress(console=console, disable=not console.is_interactive) as bar:
    list(bar.track(range(3)))
list(tqdm(range(3), desc="downloads"))
"""


UNSET = {"CI", "GITHUB_ACTIONS", "NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"}
UNSET |= {"TTY_COMPATIBLE", "TTY_INTERACTIVE", "TQDM_DISABLE", "_TYPER_FORCE_DISABLE_TERMINAL"}


def environment() -> dict[str, str]:
    """Of an ordinary terminal, with nothing in it that changes colours."""
    mine = {name: value for name, value in os.environ.items() if name not in UNSET}
    return {**mine, "TERM": "xterm-256color"}


def on_terminal(words: list[str]) -> str:
    """All that a terminal gets from `python WORDS`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with subprocess.Popen(
        [sys.executable, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environment()
    ) as process:
        os.close(theirs)
        said = b""
        with suppress(OSError):  # the terminal is gone when the program is
            while part := os.read(ours, 65536):
                said += part
        os.close(ours)
    assert process.returncode is not None
    return said.decode()


def in_pipe(words: list[str]) -> str:
    """What `python WORDS` writes to stdout and stderr, neither of them a terminal."""
    return subprocess.run(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        check=False,
    ).stdout


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.31, "0.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (200, "3 min 20 s"),
        (3599.6, "1 h"),
        (183_600, "2 d 3 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds, text):
    assert format_duration(seconds) == text


def test_sizes_and_numbers_are_rounded_for_reading():
    assert [format_bytes(size) for size in (512, 1536, 2.5 * 2**30)] == [
        "512 B",
        "1.5 KiB",
        "2.5 GiB",
    ]
    assert [format_number(value) for value in (None, 0.123456, 12345.6)] == ["", "0.1235", "12,346"]


def is_decorated(text):
    return "\x1b" in text or "\r" in text.replace(
        "\r\n", "\n"
    )  # a terminal ends its lines with both


@pytest.mark.heavy
def test_a_terminal_gets_colours_and_bars():
    said = on_terminal(["-c", PRINTS])
    assert "\x1b[1;32mIt worked." in said and "Working..." in said and "downloads" in said


@pytest.mark.heavy
def test_a_pipe_gets_whole_lines_and_no_control_characters():
    said = in_pipe(["-c", PRINTS])
    assert "It worked." in said and not is_decorated(said) and "downloads" not in said
    assert any("/a/long/path/" + "x" * 90 in line for line in said.splitlines())


@pytest.mark.heavy
def test_a_bar_on_the_terminal_takes_no_line_from_a_file(tmp_path):
    """rich's bars take over stdout, whose lines would then be on the terminal and not in the file."""
    program = (
        "import sys; sys.stdout = open(sys.argv[1], 'w')\n"
        "from cpt.formatting import open_console, while_working\n"
        "with while_working(open_console(stderr=True).status('busy')): print('a line of the log')"
    )
    said = on_terminal(["-c", program, str(tmp_path / "log")])
    assert (tmp_path / "log").read_text() == "a line of the log\n" and "a line" not in said
