"""How cpt prints: durations, sizes, counts and shares for people; colours and bars where somebody watches a terminal,
and plain whole lines in pipes, files, logs and CI."""

import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.status import Status

GIB = 2**30
UNITS_OF_TIME = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
UNITS_OF_SIZE = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def format_duration(seconds: float) -> str:
    """`0.3 s`, `29.5 s`, `3 min 20 s`, `4 h 5 min`, `2 d 3 h`."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    for large, name, small, other in UNITS_OF_TIME:
        count, rest = divmod(round(seconds / small), large // small)
        if count:
            return f"{count:,} {name} {rest} {other}" if rest else f"{count:,} {name}"
    raise AssertionError("60 s and more are at least one minute")


def format_bytes(num_bytes: float) -> str:
    """`512 B`, `1.5 KiB`, `14.5 MiB`, `2.3 GiB`."""
    for size, unit in UNITS_OF_SIZE:
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: float | None) -> str:
    """`220,160`; empty for None."""
    return "" if count is None else f"{count:,.0f}"


def format_share(share: float | None) -> str:
    """`70.0 %`; empty for None."""
    return "" if share is None else f"{100 * share:.1f} %"


def format_number(value: float | None, digits: int = 4, unit: str = "") -> str:
    """Significant digits, with commas in large numbers; empty for None."""
    if value is None:
        return ""
    text = f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"
    return f"{text} {unit}" if unit else text


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
