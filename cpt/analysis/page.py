"""A self-contained HTML page of text, facts, tables and matplotlib plots, rendered from `page.html`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment
from numpy.typing import NDArray

from cpt.errors import ResourceError, install_line
from cpt.files import write_atomic

MOST_POINTS = 50  # of a curve whose values are marked
STYLE: Any = {
    "path.simplify_threshold": 0.5,  # pixels: a long curve becomes small, and its spikes stay
    "svg.fonttype": "none",  # text stays text, a tenth of the size of outlines
    "text.parse_math": False,  # names may have dollar signs
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}


@dataclass(frozen=True)
class Plot:
    title: str
    svg: str


@dataclass(frozen=True)
class Curve:
    name: str
    x: Sequence[float] | NDArray[np.float64]
    y: Sequence[float] | NDArray[np.float64]
    """Empty: vertical lines at `x`."""
    faint: bool = False
    """Draw pale, in the color of the next curve: raw values behind smoothed ones."""
    color: int | None = None
    """Number of the color, to keep it in several plots; by default the next one."""


@dataclass(frozen=True)
class Margin:
    """A square around a point, of changes that do not count; both axes then have one scale, and show it whole."""

    x: float
    y: float
    reach: tuple[float, float]


def curves(
    title: str,
    unit: str,
    lines: Sequence[Curve],
    *,
    over: str = "tokens",
    marks: Sequence[float] = (),
    margin: Margin | None = None,
) -> list[Plot]:
    """A plot with triangles for events at `marks` on the x axis; none without values.

    Raises:
        ResourceError: matplotlib is missing.
    """
    drawn = [line for line in lines if len(line.y)]
    if not drawn:
        return []
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure  # without pyplot: no display, no state
    except ImportError as problem:
        raise ResourceError(
            f"the plots of a page need matplotlib. Install it: {install_line('plots')}"
        ) from problem
    with rc_context(STYLE):
        figure = Figure(figsize=(6, 3.4), layout="constrained")
        axes: Any = figure.subplots()
        color = 0
        for line in drawn:
            marker = "." if len(line.x) <= MOST_POINTS else ""
            (drawing,) = axes.plot(
                line.x,
                line.y,
                marker=marker,
                color=f"C{color if line.color is None else line.color}",
                label=as_label(line.name),
            )
            if line.faint:
                drawing.set(linewidth=0.8, alpha=0.35)
            else:
                drawing.set(linewidth=1.6, alpha=1)
                color += 1
        axes.set(xlabel=over, ylabel=as_label(unit))
        if len(marks):
            top = axes.get_xaxis_transform()  # y from 0 to 1
            heights = [0.98] * len(marks)
            axes.plot(marks, heights, "v", color="C3", markersize=7, transform=top, label="events")
        for line in lines:
            if not len(line.y):
                for x in line.x:
                    axes.axvline(x, color="0.4", linestyle="--", linewidth=0.8)
        if margin is not None:
            draw_margin(axes, margin)
        if len(drawn) > 1 or len(marks):
            figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
        text = StringIO()
        figure.savefig(
            text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    svg = text.getvalue()
    return [Plot(title, svg[svg.index("<svg") :])]


def draw_margin(axes: Any, margin: Margin) -> None:
    width, height = margin.reach
    left = margin.x - width
    right = margin.x + width
    bottom = margin.y - height
    top = margin.y + height
    xs = (left, right, right, left)
    ys = (bottom, bottom, top, top)
    axes.fill(xs, ys, color="0.9", label="negligible", zorder=0)
    # Both axes show as many percent.
    x_low, x_high = axes.get_xlim()
    y_low, y_high = axes.get_ylim()
    center_x = (x_low + x_high) / 2
    center_y = (y_low + y_high) / 2
    reach = max((x_high - x_low) / width, (y_high - y_low) / height) / 2
    axes.set_xlim(center_x - reach * width, center_x + reach * width)
    axes.set_ylim(center_y - reach * height, center_y + reach * height)


def as_label(text: str) -> str:
    # a legend skips names that begin with `_`; SVG does not allow lone surrogates or control characters
    printable = "".join(sign if sign.isprintable() else "?" for sign in text)
    if printable.startswith("_"):
        return f" {printable}"
    return printable


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True)
class Folded:
    title: str
    text: str


Part = str | Mapping[str, str] | Table | Folded | Plot
"""A string is a paragraph, or HTML if it is `Markup`; a mapping has names and values."""


def html_page(title: str, sections: Mapping[str, Sequence[Part]], lead: str = "") -> str:
    """Render the page: `lead` in large type, then each heading with its parts; empty sections are skipped."""
    template = Environment(autoescape=True).from_string(
        Path(__file__).with_name("page.html").read_text("utf-8")
    )
    filled_sections = {name: parts for name, parts in sections.items() if parts}
    return template.render(title=title, lead=lead, sections=filled_sections)


def write_page(path: Path, text: str) -> None:
    try:
        write_atomic(path, text.encode("utf-8", "replace"))
    except (OSError, ValueError) as problem:  # ValueError: an empty name
        raise ResourceError(
            f"{path} cannot be written: {problem}. Name a file in an existing folder."
        ) from problem
