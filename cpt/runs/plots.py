"""Plots of a run's page as plotly draws them: curves thinned out with their extremes kept, bars, and differences with
intervals."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpt.errors import ResourceError

MOST_POINTS = 2000  # of one curve; a screen has fewer columns
MOST_IN_A_PLOT, FEWEST_POINTS = 4000, 250  # of all its curves together, and of each of very many
FEW_ROWS = 10  # of a plot of intervals, which then stand further apart
MOST_LINES = 60  # of marks, drawn down through the plot
DIGITS = 6
SMALL = 0.01  # a scale that ends below is written with exponents
COLORS = ("#3b82c4", "#d97706", "#2f9e6e", "#c2527f", "#7c6fd6", "#8a8f1f", "#21a0b5", "#b4632f", "#6b7a90", "#d0473f")
"""Told apart on white and on black."""
MARK_COLOR = "#d0473f"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One line of a plot."""

    name: str
    x: ArrayLike
    y: ArrayLike
    faint: bool = False
    """Drawn pale, in the colour of the curve that follows: raw values behind their smoothed ones."""
    symbol: str = ""
    """Of each point, as plotly calls it (`circle`, `x`); by default there is only the line."""
    hover: Sequence[str] = ()
    """What each point says under the mouse, besides its place; such a curve is not thinned out."""


@dataclass(frozen=True)
class Plot:
    """Curves over one axis."""

    title: str
    x_title: str
    y_title: str
    curves: Sequence[Curve]
    log_y: bool = False
    from_zero: bool = False
    """The y axis begins at 0."""
    marks: Sequence[tuple[float, str]] = ()
    """Moments: where on the x axis, and what happened."""
    note: str = ""
    """A sentence beneath it."""


@dataclass(frozen=True)
class Bars:
    """Groups of bars, one bar of each series in a group, side by side or on top of each other."""

    title: str
    y_title: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    stacked: bool = False
    note: str = ""


@dataclass(frozen=True)
class Intervals:
    """Values with their intervals, a line for each; 0 is marked."""

    title: str
    x_title: str
    rows: Sequence[tuple[str, float, float, float]]
    """Name, value, low, high."""
    note: str = ""


Drawing = Plot | Bars | Intervals


def figure_json(drawing: Drawing) -> str:
    """Data and layout for plotly.js, safe inside a `<script>` element.

    Raises:
        ResourceError: plotly is not installed.
    """
    try:
        from plotly.graph_objects import Figure
    except ImportError as problem:
        raise no_plotly() from problem
    if isinstance(drawing, Plot):
        traces, layout = plot_figure(drawing)
    elif isinstance(drawing, Bars):
        traces, layout = bars_figure(drawing)
    else:
        traces, layout = intervals_figure(drawing)
    shared = {
        "template": "none",
        "colorway": COLORS,
        "margin": {"l": 64, "r": 16, "t": 12, "b": 48},
        "font": {"size": 12},
    }
    text: str = Figure(traces, {**shared, **layout}).to_json()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def plotly_script() -> str:
    """plotly.js itself, to stand once in a page.

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
    """What to install."""
    return ResourceError("the plots of a page need plotly. Install it: pip install 'cpt[report]'")


def plot_figure(plot: Plot) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Traces and layout of curves."""
    traces: list[dict[str, Any]] = []
    color = 0
    most = min(MOST_POINTS, max(FEWEST_POINTS, MOST_IN_A_PLOT // max(1, len(plot.curves))))
    for curve in plot.curves:
        has_few = len(plot.curves) <= 2
        traces.append(
            curve_trace(curve, most)
            | {"legendgroup": "" if has_few else str(color), "showlegend": has_few or not curve.faint}
        )
        traces[-1]["line"]["color"] = traces[-1]["marker"]["color"] = COLORS[color % len(COLORS)]
        color += not curve.faint
    zero = {"rangemode": "tozero"} if plot.from_zero else {}
    highest = max((abs(value) for trace in traces for value in trace["y"] if value is not None), default=0.0)
    layout: dict[str, Any] = {
        "xaxis": axis(plot.x_title),
        "yaxis": axis(
            plot.y_title,
            type="log" if plot.log_y else "linear",
            exponentformat="B" if highest > SMALL else "e",
            **zero,
        ),
        "hovermode": "closest" if len(traces) > 8 or any(curve.hover for curve in plot.curves) else "x unified",
        "showlegend": len(traces) + bool(plot.marks) > 1,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    }
    if plot.marks:
        traces.append(marks_trace(plot.marks))
        layout["yaxis2"] = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
        layout["shapes"] = [mark_line(x) for x in sorted({x for x, _ in plot.marks})[:MOST_LINES]]
    return traces, layout


def curve_trace(curve: Curve, most: int) -> dict[str, Any]:
    """A line, thinned out where it is long."""
    x, y = np.asarray(curve.x, dtype=np.float64), np.asarray(curve.y, dtype=np.float64)
    has_points = bool(curve.symbol) or (len(x) < 3 and not curve.faint)
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers" if len(x) == 1 else "lines+markers" if has_points else "lines",
        "name": as_text(curve.name),
        "opacity": 0.35 if curve.faint else 1.0,
        "line": {"width": 1 if curve.faint else 2},
        "marker": {"size": 9 if len(x) == 1 else 6, "symbol": curve.symbol or "circle"},
    }
    if curve.hover:
        trace |= {"text": [as_text(text) for text in curve.hover], "hovertemplate": "%{text}<extra></extra>"}
    else:
        x, y = thinned(x, y, most)
    return trace | {"x": rounded(x, 12), "y": rounded(y)}


def thinned(x: Floats, y: Floats, most: int) -> tuple[Floats, Floats]:
    """At most `most` points: of each stretch of the curve its lowest and its highest, and both ends; what is not
    finite is left out."""
    kept = np.isfinite(x) & np.isfinite(y)
    x, y = x[kept], y[kept]
    if len(x) <= most:
        return x, y
    stretches = np.array_split(np.arange(len(x)), max(1, (most - 2) // 2))
    extremes = [place for one in stretches for place in (one[y[one].argmin()], one[y[one].argmax()])]
    places = np.unique([0, *extremes, len(x) - 1])
    return x[places], y[places]


def marks_trace(marks: Sequence[tuple[float, str]]) -> dict[str, Any]:
    """A triangle at the top for each moment, which says under the mouse what happened."""
    told: dict[float, list[str]] = {}
    for x, text in marks:
        told.setdefault(x, []).append(as_text(text))
    texts = [
        "<br>".join([*lines[:5], *([f"and {len(lines) - 5} more"] if len(lines) > 5 else [])])
        for lines in told.values()
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "events",
        "x": list(told),
        "y": [0.985] * len(told),
        "yaxis": "y2",
        "marker": {"symbol": "triangle-down", "size": 11, "color": MARK_COLOR},
        "text": texts,
        "hovertemplate": "%{text}<extra></extra>",
    }


def mark_line(x: float) -> dict[str, Any]:
    """A dotted line from the triangle down."""
    line = {"color": MARK_COLOR, "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line, "opacity": 0.6}


def bars_figure(bars: Bars) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Traces and layout of bars."""
    groups = [as_text(group) for group in bars.groups]
    traces = [
        {"type": "bar", "name": as_text(name), "x": groups, "y": rounded(values), "hovertemplate": "%{x}: %{y:.4~g}"}
        for name, values in bars.series.items()
    ]
    return traces, {
        "barmode": "stack" if bars.stacked else "group",
        "xaxis": {"type": "category", "automargin": True},
        "yaxis": axis(bars.y_title, rangemode="tozero"),
        "showlegend": len(traces) > 1,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "bargap": 0.35,
    }


def intervals_figure(intervals: Intervals) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Traces and layout of values with their intervals, the first one on top."""
    names, values, lows, highs = zip(*reversed(intervals.rows), strict=True) if intervals.rows else ((), (), (), ())
    above = [high - value for high, value in zip(highs, values, strict=True)]
    below = [value - low for value, low in zip(values, lows, strict=True)]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": rounded(values),
        "y": [as_text(name) for name in names],
        "marker": {"size": 10},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": rounded(above),
            "arrayminus": rounded(below),
            "thickness": 2,
        },
        "hovertemplate": "%{y}: %{x:.3~g}<extra></extra>",
    }
    zero = {
        "type": "line",
        "x0": 0,
        "x1": 0,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": "#888888", "width": 1, "dash": "dash"},
    }
    return [trace], {
        "xaxis": axis(intervals.x_title, rangemode="tozero"),
        "yaxis": {"type": "category", "automargin": True, "range": [-0.5, len(names) - 0.5]},
        "shapes": [zero],
        "height": 120 + (44 if len(names) < FEW_ROWS else 26) * len(names),
        "showlegend": False,
    }


def axis(title: str, **more: Any) -> dict[str, Any]:
    """With a title that stands clear of the numbers."""
    return {"title": {"text": as_text(title), "standoff": 8}, "automargin": True, "exponentformat": "B", **more}


def as_text(text: str) -> str:
    """Text that stays text, in HTML and for plotly, which takes tags for mark-up; what no file can hold, half of a
    pair, becomes `?`."""
    return html.escape(text.encode("utf-8", "replace").decode("utf-8"))


def rounded(values: ArrayLike | Sequence[float | None], digits: int = DIGITS) -> list[float | None]:
    """Significant digits, enough to be read off; None where there is no number."""
    return [
        float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None
        for value in np.asarray(values, dtype=object)
    ]
