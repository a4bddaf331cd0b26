"""Run the blocks of a page as its reader does: top to bottom, in one folder, one shell, and compare what it shows with
what is printed."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from documented.blocks import Block, PageError, typed
from documented.forks import environment_of_pages
from documented.output import not_printed

SECONDS = 900
STATE = ".shell"
"""Between two blocks: the exported variables and the folder."""
SHELL = """\
set -eo pipefail
if [ -f "$PAGE_STATE" ]; then source "$PAGE_STATE"; fi
trap '{ export -p; printf "cd %q\\n" "$PWD"; } > "$PAGE_STATE"' EXIT
"""
LAST_LINES = 25


@dataclass
class Session:
    """What stays from one block to the next.

    Args:
        ports: those that the page names -> the free ones that take their place.
        programs: a folder with a `cpt` that begins at once.
    """

    folder: Path
    programs: Path | None = None
    ports: dict[int, int] = field(default_factory=dict)
    printed: str = ""
    going_on: "list[Started]" = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """As of all pages, with a `cpt` that begins at once where there is one, and this page's own cache."""
        ours = environment_of_pages() | {
            "CPT_CACHE": str(self.folder / ".cache"),
            "PAGE_STATE": str(self.folder / STATE),
        }
        return ours | {"PATH": f"{self.programs}{os.pathsep}{ours['PATH']}"} if self.programs else ours

    def with_free_ports(self, text: str) -> str:
        """The text with ports that are free here."""
        for port, free in self.ports.items():
            text = re.sub(rf"\b{port}\b", str(free), text)
        return text


def run_blocks(blocks: Sequence[Block], folder: Path, ports: Sequence[int] = (), programs: Path | None = None) -> None:
    """Run what is to be run, write what is to be written, in the page's order.

    Raises:
        PageError: the first that fails, with its last lines.
    """
    with opened(Session(folder, programs, {port: free_port() for port in ports})) as session:
        for block in blocks:
            if "file" in block.settings:
                write_file(block, session)
            elif "prints" in block.settings:
                compare(block, block.text.splitlines(), session.printed)
            elif block.is_run and block.language == "python":
                run_program(block, session)
            elif block.is_run:
                run_commands(block, session)


@contextlib.contextmanager
def opened(session: Session) -> Iterator[Session]:
    """Stops at the end what does not stop by itself, with all that it started."""
    try:
        yield session
    finally:
        for started in session.going_on:
            started.end()


def write_file(block: Block, session: Session) -> None:
    """The block's text, where its comment says."""
    path = session.folder / block.settings["file"]
    if session.folder.resolve() not in path.resolve().parents:
        raise PageError(f"{block.place}: {path} is outside of the page's folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(session.with_free_ports(block.text))


def run_program(block: Block, session: Session) -> None:
    """A block of Python, as a program of its own."""
    started = start([sys.executable, "-c", session.with_free_ports(block.text)], session)
    code, session.printed = wait_for(started, block), started.printed
    if code != 0:
        raise PageError(f"{block.place}: ended with {code}\n{end_of(session.printed)}")


def run_commands(block: Block, session: Session) -> None:
    """A block of commands: each one by itself where the page says what it prints, else as one script."""
    session.printed = ""
    steps = typed(block)
    for step in steps:
        started = start(["bash", "-c", SHELL + session.with_free_ports(step.command)], session)
        if step is steps[-1] and "until" in block.settings:
            session.going_on.append(started)
            wait_until(session.with_free_ports(block.settings["until"]), started, block)
        else:
            expected = block.exit_code if step is steps[-1] else 0
            code = wait_for(started, block)
            if code != expected:
                raise PageError(
                    f"{block.place}: `{step.command.strip()}` ended with {code}, not with"
                    f" {expected}\n{end_of(started.printed)}"
                )
        session.printed += started.printed
        compare(block, session.with_free_ports("\n".join(step.printed)).splitlines(), started.printed)


def compare(block: Block, shown: Sequence[str], printed: str) -> None:
    """Each shown line is found, in order.

    Raises:
        PageError: the first that is not.
    """
    missing = not_printed(shown, printed)
    if missing is not None:
        raise PageError(
            f"{block.place}: shown, but not printed there:\n  {missing}\nPrinted:\n{end_of(printed, lines=80)}"
        )


@dataclass
class Started:
    """A process with a group of its own; what it prints, errors too, goes to a file."""

    process: subprocess.Popen[bytes]
    file: Path

    @property
    def printed(self) -> str:
        """All of it so far."""
        return self.file.read_text(errors="replace")

    def end(self) -> None:
        """As Ctrl-C would; after 20 s by force."""
        for number, seconds in ((signal.SIGINT, 20), (signal.SIGKILL, 10)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)


def start(words: Sequence[str], session: Session) -> Started:
    """Begin, without input, in the page's folder."""
    descriptor, name = tempfile.mkstemp(dir=session.folder, prefix=".printed-")
    with open(descriptor, "wb") as output:
        process = subprocess.Popen(
            words,
            cwd=session.folder,
            env=session.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Started(process, Path(name))


def wait_for(started: Started, block: Block) -> int:
    """The exit code."""
    try:
        return started.process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        started.end()
        raise PageError(
            f"{block.place}: not finished after {SECONDS} s; shorten it, or write <!-- needs: time -->"
        ) from None


def wait_until(words: str, started: Started, block: Block) -> None:
    """Until it printed these words; it goes on."""
    begun = time.monotonic()
    while words not in started.printed:
        if started.process.poll() is not None or time.monotonic() - begun > SECONDS:
            raise PageError(f"{block.place}: ended before it printed `{words}`\n{end_of(started.printed)}")
        time.sleep(0.1)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def end_of(printed: str, lines: int = LAST_LINES) -> str:
    """Its last lines."""
    return "\n".join(f"  {line}" for line in printed.splitlines()[-lines:])
