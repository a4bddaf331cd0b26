"""Format output: durations, sizes, counts and shares; colors and progress bars in a terminal, plain lines in pipes,
files, logs and CI."""

import math
import os
import sys
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

GIB = 2**30
MIB = 2**20
UNITS_OF_TIME = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
UNITS_OF_SIZE = ((2**40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB"))


def format_duration(seconds: float) -> str:
    """Such as `0.3 s`, `29.5 s`, `3 min 20 s`, `4 h 5 min`, `2 d 3 h`."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    for large, name, small, other in UNITS_OF_TIME:
        count, rest = divmod(round(seconds / small), large // small)
        if count:
            if rest:
                return f"{count:,} {name} {rest} {other}"
            return f"{count:,} {name}"
    raise AssertionError("60 s and more are at least one minute")


def format_bytes(num_bytes: float) -> str:
    """`512 B`, `1.5 KiB`, `14.5 MiB`, `2.3 GiB`."""
    for size, unit in UNITS_OF_SIZE:
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: float | None) -> str:
    """`220,160`; empty for None."""
    if count is None:
        return ""
    return f"{count:,.0f}"


def format_share(share: float | None) -> str:
    """`70.0 %`; empty for None."""
    if share is None:
        return ""
    return f"{100 * share:.1f} %"


def format_number(value: float | None, digits: int = 4, unit: str = "") -> str:
    """Significant digits, with commas in large numbers; empty for None."""
    if value is None:
        return ""
    text = f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"
    if unit:
        return f"{text} {unit}"
    return text


WIDTH_OF_A_FILE = 1000
"""Columns without a terminal: a path that is broken into two lines cannot be searched."""

NOT_WATCHED = {
    "TTY_COMPATIBLE": "0",  # for rich, and thus typer's pages
    "TTY_INTERACTIVE": "0",
    "_TYPER_FORCE_DISABLE_TERMINAL": "1",  # typer colors its pages in GitHub's CI, even in pipes
    "TQDM_DISABLE": "1",  # bars of datasets, transformers and Hub downloads
}
"""Environment variables of packages; most read them at import."""


BARS = " ▁▂▃▄▅▆▇█"


def bars(values: Iterable[float | None], highest: float) -> str:
    """One bar per value, up to the highest; a space for None."""
    bars = []
    for value in values:
        level = 0 if value is None else math.ceil((len(BARS) - 1) * value / highest)
        bars.append(" " if value is None else BARS[level])
    return "".join(bars)


def open_console(*, stderr: bool = False) -> "Console":
    """Return the console for all commands; `stderr` for progress next to machine-readable output."""
    from rich.console import Console  # worker processes print no tables

    # With `soft_wrap` only tables are fitted to the width: commands to copy stay on one line.
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.file.isatty() and not os.environ.get("COLUMNS"):
        console.width = WIDTH_OF_A_FILE
    # While a bar is shown, rich captures both streams: if one of them is a file, it would miss output printed
    # meanwhile.
    console.is_interactive = console.is_interactive and sys.stdout.isatty() and sys.stderr.isatty()
    return console


@contextmanager
def while_working(status: "Status") -> Iterator[None]:
    """Show the current activity in a terminal; elsewhere print nothing."""
    with status if status.console.is_interactive else nullcontext():
        yield


def set_plain_output(environment: MutableMapping[str, str], *, on_terminal: bool) -> None:
    """Make libraries print plain text without a terminal or if colors are disabled, also in child processes.

    `FORCE_COLOR` takes precedence, and variables that the user set for a package are kept. `on_terminal`: bars, which
    go to stderr, are visible.
    """
    in_ci = environment.get("CI", "").lower() not in ("", "0", "false")
    has_no_colors = environment.get("TERM", "") in ("dumb", "unknown")
    variables: tuple[str, ...] = ()
    if environment.get("FORCE_COLOR"):
        variables = () if on_terminal else ("TQDM_DISABLE",)
    elif environment.get("NO_COLOR") or in_ci or has_no_colors:  # no-color.org
        variables = tuple(NOT_WATCHED)
    elif not on_terminal:
        variables = ("TQDM_DISABLE", "_TYPER_FORCE_DISABLE_TERMINAL")
    for name in variables:
        environment.setdefault(name, NOT_WATCHED[name])
