"""Figures as a person writes them: times, counts, shares, differences with their intervals."""

from collections.abc import Mapping
from typing import Any

from cpt.report.found import number

UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def told_seconds(seconds: float) -> str:
    """`29.5 s`, `3 min 20 s`, `4 h 5 min`, `2 d 3 h`."""
    for large, name, small, other in UNITS:
        if seconds >= large:
            return f"{seconds // large:.0f} {name} {seconds % large // small:.0f} {other}"
    return f"{seconds:.1f} s"


def told_count(value: float | None) -> str:
    """`220,160`; empty where there is none."""
    return "" if value is None else f"{value:,.0f}"


def told(value: float | None, digits: int = 4, unit: str = "") -> str:
    """Significant digits; empty where there is none."""
    if value is None:
        return ""
    text = f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"
    return f"{text} {unit}" if unit else text


def told_share(value: float | None) -> str:
    """`70.0 %`."""
    return "" if value is None else f"{100 * value:.1f} %"


def relative_interval(difference: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """Change, low and high in percent of the value before; None where one of them is missing."""
    before, change, low, high = (number(difference, key) for key in ("before", "difference", "low", "high"))
    if not before or change is None or low is None or high is None:
        return None
    return 100 * change / before, 100 * low / before, 100 * high / before


def judged(difference: Mapping[str, Any], *, higher_is_better: bool) -> str:
    """Better, worse, or no clear difference."""
    low, high = number(difference, "low"), number(difference, "high")
    if low is None or high is None:
        return "not known"
    if low <= 0 <= high:
        return "no clear difference"
    return "better" if (low > 0) == higher_is_better else "worse"
