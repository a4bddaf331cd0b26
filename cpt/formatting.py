"""Format durations, sizes, counts and shares for people."""

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
