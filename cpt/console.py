"""How cpt prints: colours and bars where somebody watches a terminal; plain whole lines in pipes, files, logs and
CI."""

import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.status import Status

WIDTH_OF_A_FILE = 1000
"""Columns where no terminal sets a limit: a path that is broken in two lines cannot be found again."""

NOT_WATCHED = {
    "TTY_COMPATIBLE": "0",  # of rich, and so of typer's pages
    "TTY_INTERACTIVE": "0",
    "_TYPER_FORCE_DISABLE_TERMINAL": "1",  # typer colours its pages in GitHub's CI, in pipes too
    "TQDM_DISABLE": "1",  # bars of datasets, transformers and the Hub's downloads
}
"""What the packages read, most of them when they are imported."""


def open_console(*, stderr: bool = False) -> Console:
    """The console that every command prints with; `stderr` for bars and notes next to an output for programs."""
    # With `soft_wrap` only tables are fitted to the width: a command that is printed to be copied stays one line.
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.file.isatty() and not os.environ.get("COLUMNS"):
        console.width = WIDTH_OF_A_FILE
    # While a bar shows, rich takes over both streams: where one of them is a file, it would miss what is printed
    # meanwhile.
    console.is_interactive = console.is_interactive and sys.stdout.isatty() and sys.stderr.isatty()
    return console


@contextmanager
def while_working(status: Status) -> Iterator[None]:
    """Show what is being done while it is done, where somebody watches; elsewhere nothing."""
    with status if status.console.is_interactive else nullcontext():
        yield


def show_step(status: Status, text: str) -> None:
    """Show the current step: in a terminal as the status line, elsewhere as a new line."""
    if status.console.is_interactive:
        status.update(text)
    else:
        status.console.file.write(f"{text}\n")
        status.console.file.flush()


def set_plain_output(environment: MutableMapping[str, str], *, on_terminal: bool) -> None:
    """Make libraries print plain text if there is no terminal or colours are not wanted, also in child processes.

    `FORCE_COLOR` is stronger than all of it, and what the user set for one of the packages stays. `on_terminal`: bars,
    which go to stderr, would be seen.
    """
    in_ci = environment.get("CI", "").lower() not in ("", "0", "false")
    has_no_colors = environment.get("TERM", "") in ("dumb", "unknown")
    wanted: tuple[str, ...] = ()
    if environment.get("FORCE_COLOR"):
        wanted = () if on_terminal else ("TQDM_DISABLE",)
    elif environment.get("NO_COLOR") or in_ci or has_no_colors:  # no-color.org
        wanted = tuple(NOT_WATCHED)
    elif not on_terminal:
        wanted = ("TQDM_DISABLE", "_TYPER_FORCE_DISABLE_TERMINAL")
    for name in wanted:
        environment.setdefault(name, NOT_WATCHED[name])
