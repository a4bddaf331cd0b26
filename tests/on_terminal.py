"""Run a program on a terminal of its own, or into a pipe, and give back what it printed."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from contextlib import suppress

UNSET = {"CI", "GITHUB_ACTIONS", "NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"}
UNSET |= {"TTY_COMPATIBLE", "TTY_INTERACTIVE", "TQDM_DISABLE", "_TYPER_FORCE_DISABLE_TERMINAL"}


def environment(**more: str) -> dict[str, str]:
    """Of an ordinary terminal, with nothing in it that changes colours but what is given."""
    mine = {name: value for name, value in os.environ.items() if name not in UNSET}
    return {**mine, "TERM": "xterm-256color", **more}


def on_terminal(words: list[str], width: int = 80, **more: str) -> str:
    """All that a terminal gets from `python WORDS`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    with subprocess.Popen(
        [sys.executable, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environment(**more)
    ) as process:
        os.close(theirs)
        said = b""
        with suppress(OSError):  # the terminal is gone when the program is
            while part := os.read(ours, 65536):
                said += part
        os.close(ours)
    assert process.returncode is not None
    return said.decode()


def in_pipe(words: list[str], **more: str) -> str:
    """What `python WORDS` writes to stdout and stderr, neither of them a terminal."""
    return subprocess.run(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**more),
        check=False,
    ).stdout
