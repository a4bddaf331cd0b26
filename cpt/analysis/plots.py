"""Plots of a page, drawn by plotly: curves, and values with their intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpt.errors import ResourceError

MOST_POINTS = 2000  # of one curve; a screen has fewer columns
SMALL = 0.01  # axes that end below have exponents; plotly's default would write 10 µ
SMOOTHED_OVER = 0.02  # of the values of a curve
COLORS = ("#3b82c4", "#d97706", "#2f9e6e", "#c2527f", "#7c6fd6", "#8a8f1f", "#21a0b5", "#b4632f", "#6b7a90", "#d0473f")
LAYOUT: dict[str, Any] = {
    "template": "plotly_white",
    "colorway": COLORS,
    "height": 340,
    "margin": {"l": 64, "r": 16, "t": 12, "b": 48},
    "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
}


@dataclass(frozen=True)
class Plot:
    """A plotly figure with its heading, and a sentence beneath it."""

    title: str
    traces: Sequence[dict[str, Any]]
    layout: dict[str, Any]
    note: str = ""

    def html(self) -> str:
        """A `<div>` and the script that fills it; the page holds plotly.js.

        Raises:
            ResourceError: plotly is not installed.
        """
        try:
            from plotly.graph_objects import Figure
        except ImportError as problem:
            raise no_plotly() from problem
        figure = Figure(list(self.traces), {**LAYOUT, **self.layout})
        text: str = figure.to_html(
            full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True}
        )
        return text


@dataclass(frozen=True)
class Curve:
    """One line of a plot."""

    name: str
    x: ArrayLike
    y: ArrayLike
    faint: bool = False
    """Pale and in the color of the next curve: raw values behind smoothed ones."""
    mode: str = "lines"
    """`lines`, `markers` or `lines+markers`."""


def curves(
    title: str,
    y_title: str,
    lines: Sequence[Curve],
    *,
    x_title: str = "tokens",
    marks: Sequence[tuple[float, str]] = (),
    note: str = "",
) -> list[Plot]:
    """A plot of the curves with points; none if no curve has any.

    Args:
        marks: places on the x axis, and what happened there.
    """
    traces: list[dict[str, Any]] = []
    color = 0
    for line in lines:
        x, y = thinned(np.asarray(line.x, dtype=np.float64), np.asarray(line.y, dtype=np.float64))
        if len(x):
            traces.append(
                {
                    "type": "scatter",
                    "name": as_text(line.name),
                    "x": x,
                    "y": y,
                    "mode": "markers" if len(x) == 1 else line.mode,
                    "opacity": 0.35 if line.faint else 1.0,
                    "line": {"color": COLORS[color % len(COLORS)], "width": 1 if line.faint else 2},
                }
            )
            color += not line.faint
    if not traces:
        return []
    highest = max(np.abs(trace["y"]).max() for trace in traces)
    layout: dict[str, Any] = {
        "xaxis": {"title": x_title},
        "yaxis": {"title": y_title, "exponentformat": "e" if highest < SMALL else "B"},
        "showlegend": len(traces) > 1,
        "hovermode": "x unified" if len(traces) <= 8 and x_title == "tokens" else "closest",
    }
    if marks:
        layout["yaxis2"] = {"overlaying": "y", "range": [0, 1], "visible": False}
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "events",
                "x": [x for x, _ in marks],
                "y": [0.98] * len(marks),
                "yaxis": "y2",
                "marker": {"symbol": "triangle-down", "size": 11, "color": "#d0473f"},
                "text": [as_text(text) for _, text in marks],
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    return [Plot(title, traces, layout, note)]


def thinned(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """At most `MOST_POINTS` finite points; the lowest and highest of each stretch stay, so spikes stay visible."""
    there = np.isfinite(x) & np.isfinite(y)
    x, y = x[there], y[there]
    if len(x) <= MOST_POINTS:
        return x, y
    stretches = np.array_split(np.arange(len(x)), MOST_POINTS // 2 - 1)
    extremes = [place for one in stretches for place in (one[y[one].argmin()], one[y[one].argmax()])]
    places = np.unique([0, *extremes, len(x) - 1])
    return x[places], y[places]


def smoothed(values: NDArray[np.float64], share: float = SMOOTHED_OVER) -> NDArray[np.float64]:
    """The mean of each value and its neighbours; near the ends, of those that exist.

    Args:
        share: of all values.
    """
    reach = round(len(values) * share / 2)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    low, high = np.maximum(0, places - reach), np.minimum(len(values), places + reach + 1)
    means: NDArray[np.float64] = (sums[high] - sums[low]) / (high - low)
    return means


def intervals(title: str, x_title: str, rows: Sequence[tuple[str, float, float, float]], note: str = "") -> list[Plot]:
    """Values with their intervals, one per line, and a line at 0.

    Args:
        rows: name, value, low, high.
    """
    if not rows:
        return []
    names, values, lows, highs = zip(*reversed(rows), strict=True)
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": values,
        "y": [as_text(name) for name in names],
        "marker": {"size": 10},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": np.subtract(highs, values),
            "arrayminus": np.subtract(values, lows),
        },
    }
    layout = {
        "xaxis": {"title": x_title, "zerolinecolor": "#888888", "zerolinewidth": 2, "rangemode": "tozero"},
        "yaxis": {"automargin": True},
        "height": 120 + 40 * len(rows),
    }
    return [Plot(title, [trace], layout, note)]


def as_text(text: str) -> str:
    """Text that plotly shows as it is; half of a surrogate pair, which JSON cannot hold, becomes `?`."""
    return escape(text.encode("utf-8", "replace").decode("utf-8"))


def plotly_script() -> str:
    """plotly.js, to be included once in a page.

    Raises:
        ResourceError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as problem:
        raise no_plotly() from problem
    script: str = get_plotlyjs()
    return script


def no_plotly() -> ResourceError:
    return ResourceError("the plots of a page need plotly. Install it: pip install 'cpt[report]'")
