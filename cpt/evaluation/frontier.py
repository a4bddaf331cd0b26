"""Draw what a run gained against what it forgot: domain over general bits per byte, before, during and after."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cpt.errors import DataError, ResourceError
from cpt.evaluation.retention import Point, average

Course = Sequence[Point]


def plot_frontier(courses: Mapping[str, Course], general: Sequence[str], path: Path) -> None:
    """Write a picture of one run or of several; its format follows from the name.

    Args:
        courses: run's name -> its evaluations, in order.
        general: the held-out sets of general text; the others are the domain.

    Raises:
        DataError: there is nothing to draw.
        ResourceError: matplotlib is not installed, or the file cannot be written.
    """
    domain = domain_sets(courses, general)
    try:
        from matplotlib.figure import Figure  # without pyplot: no display, no state
    except ImportError as problem:
        raise ResourceError("the frontier plot needs matplotlib. Install it: pip install 'cpt[plots]'") from problem
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    axes: Any = figure.subplots()
    for number, (name, course) in enumerate(courses.items()):
        draw_course(axes, name, course, (domain, list(general)), f"C{number}", is_alone=len(courses) == 1)
    axes.set_xlabel(f"{', '.join(general)}: bits per byte (to the right: forgotten)")
    axes.set_ylabel(f"{', '.join(domain)}: bits per byte (downwards: learnt)")
    axes.set_title("What was gained, and what it cost")
    axes.margins(0.15)
    axes.grid(alpha=0.3)
    if len(courses) > 1:
        axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as problem:
        raise ResourceError(
            f"{path}: cannot write the picture ({problem}). Give it the name of a .png file."
        ) from problem


def domain_sets(courses: Mapping[str, Course], general: Sequence[str]) -> list[str]:
    """The sets that are not general, in every evaluation.

    Raises:
        DataError: there is none, or no general one, or no evaluation.
    """
    points = [point for course in courses.values() for point in course]
    if not points:
        raise DataError(
            "no evaluation was logged, so there is nothing to draw. Hold documents out: `evaluation.held_out_share`."
        )
    names = [name for name in points[0].bits_per_byte if all(name in point.bits_per_byte for point in points)]
    domain = [name for name in names if name not in general]
    if not domain or not set(general) & set(names):
        raise DataError(
            f"the frontier needs a domain and a general set; the run evaluated {', '.join(names)}, of which"
            f" `evaluation.retain` names {', '.join(general) or 'none'}."
        )
    return domain


def draw_course(
    axes: Any, name: str, course: Course, sets: tuple[list[str], list[str]], color: str, *, is_alone: bool
) -> None:
    """A line from before to after, with a point for each evaluation; a cross where the training began, a dot where it
    ended."""
    domain, general = sets
    x, y = ([average(point, names) for point in course] for names in (general, domain))
    axes.plot(x, y, "-", color=color, alpha=0.5, linewidth=1.5)
    axes.plot(x[1:-1], y[1:-1], ".", color=color, alpha=0.7)
    axes.plot(x[:1], y[:1], "x", color=color, markersize=9, markeredgewidth=2)
    axes.plot(x[-1:], y[-1:], "o", color=color, markersize=8, label=name)
    if is_alone:
        for label, place, down in (("before", 0, 6), (f"after {course[-1].tokens:,} tokens", -1, -14)):
            axes.annotate(label, (x[place], y[place]), xytext=(8, down), textcoords="offset points", fontsize=9)
        axes.axvline(x[0], color="0.6", linewidth=0.8, linestyle=":")
