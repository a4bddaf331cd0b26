"""`python -m benchmarks.data.plots`: the pictures of docs/pictures/ from benchmarks/results/data.json.

Times are told as multiples of something that was measured in the same run, because seconds of one machine say little
about another.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.data.results import ORDERS, RESULTS, Results, by_position
from benchmarks.data.systems import SYSTEMS

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
OURS, OTHERS, ENCODERS, RULE = "#0b6e4f", "#8d99ae", "#cdd5e2", "#d7dbe2"
GROWING = {"ours": "cpt", "run_clm_torch": "run_clm"}
WIDTH, DPI = 9.0, 110  # inches and dots: legible at the width of a README
STYLE: dict[Any, Any] = {
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.titlesize": 13,
}


def main() -> None:
    """All pictures."""
    results = json.loads((RESULTS / "data.json").read_text())
    for path in draw(results, PICTURES):
        print(path)


def draw(results: Results, folder: Path) -> list[Path]:
    """The pictures that the results are enough for."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    rcParams.update(STYLE)
    for name, picture in {"cold": cold_throughput, "growth": growth, "resume": resume, "shuffle": shuffle}.items():
        if (figure := picture(results)) is not None:
            FigureCanvasAgg(figure).print_png(path := folder / f"data_{name}.png", metadata={"Software": None})
            drawn.append(path)
    return drawn


def new_figure(height: float, title: str, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """White and opaque, so that it can be read on a dark page too."""
    figure = Figure((WIDTH, height), DPI, facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    figure.suptitle(title, x=0.012, ha="left", fontsize=13)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def cold_throughput(results: Results) -> Figure | None:
    """A bar for each system: text a second, from the jsonl file to the last batch, as a multiple of run_clm's."""
    speeds = {name: one for name, one in results["systems"].items() if "failed" not in one}
    if "run_clm" not in speeds or len(speeds) < 2:
        return None
    unit = speeds["run_clm"]["megabytes_per_second"]
    ordered = sorted(speeds.items(), key=lambda item: item[1]["megabytes_per_second"])
    figure, (axes,) = new_figure(
        0.42 * len(ordered) + 0.8,
        "Text a second, cold: from jsonl to the last batch (pale: encoders, ids only); run_clm = 1",
    )
    titles = [one["title"].replace("`", "") for _, one in ordered]
    values = [one["megabytes_per_second"] / unit for _, one in ordered]
    bars(
        axes,
        titles,
        values,
        [color_of(name) for name, _ in ordered],
        [f"{value:.1f}" if value < 10 else f"{value:.0f}" for value in values],
    )
    return figure


def bars(axes: Axes, titles: list[str], values: list[float], colors: list[str], labels: list[str]) -> None:
    """Horizontal ones from below to above, each with its figure."""
    axes.bar_label(axes.barh(titles, values, color=colors, height=0.68), labels, padding=4)
    axes.set_xlim(0, 1.08 * max(values))
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def color_of(name: str) -> str:
    """Ours stands out, encoders stand back."""
    if name in SYSTEMS and SYSTEMS[name].is_encoder:
        return ENCODERS
    return OURS if name.startswith("ours") else OTHERS


def growth(results: Results) -> Figure | None:
    """Against corpus size: time to the first batch, time to the last, and memory."""
    curves = {name: [point for point in results["growth"] if point["system"] == name] for name in GROWING}
    curves = {name: sorted(points, key=lambda point: point["megabytes"]) for name, points in curves.items()}
    if any(len(points) < 2 for points in curves.values()):
        return None
    reference = curves["run_clm_torch"][0]
    title = (
        f"Cold start against the size of the corpus; times: run_clm's first batch of {reference['megabytes']} MB = 1"
    )
    figure, axes = new_figure(3.9, title, columns=3)
    unit = reference["first_batch_seconds"]
    panels: dict[str, Callable[[Results], float]] = {
        "time to the first batch": lambda point: point["first_batch_seconds"] / unit,
        "time to the last batch": lambda point: point["total_seconds"] / unit,
        "MB of the largest process": lambda point: max(point["own_memory_mb"], point["worker_own_memory_mb"]),
    }
    for part, (title, value) in zip(axes, panels.items(), strict=True):
        for name, points in curves.items():
            line(part, [point["megabytes"] for point in points], [value(point) for point in points], color_of(name))
            last = points[-1]
            end = (last["megabytes"], value(last))
            part.annotate(GROWING[name], end, (0, 9), textcoords="offset points", ha="right", color=color_of(name))
        part.set_title(title, loc="left", fontsize=12)
        part.set_xscale("log")
        part.set_xticks(sorted({point["megabytes"] for points in curves.values() for point in points}))
        part.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        part.xaxis.set_minor_locator(NullLocator())
        part.set_xlabel("MB of text")
        part.grid(axis="y", color=RULE, linewidth=0.8)
    for part in axes[:2]:
        by_decades(part, 0.05, 60)
    axes[2].set_ylim(0, 1.2 * axes[2].get_ylim()[1])
    return figure


def by_decades(axes: Axes, lowest: float, highest: float) -> None:
    """A logarithmic height, the same wherever it is asked for, so that panels can be compared."""
    axes.set_yscale("log")
    axes.set_ylim(lowest, highest)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def line(axes: Axes, x: list[float], y: list[float], color: str, **style: Any) -> None:
    """A curve with its points."""
    axes.plot(x, y, **{"color": color, "marker": "o", "markersize": 5, "linewidth": 2.2, **style})


def resume(results: Results) -> Figure | None:
    """Time from nothing to the first batch at a position, beside a stream that replays what came before."""
    ours, index, replay = (
        by_position(results.get(name, {})) for name in ("resume", "resume_synthetic", "resume_replay")
    )
    if min(map(len, (ours, index, replay))) < 2:
        return None
    unit = min(ours.values())
    figure, (axes,) = new_figure(4.2, "Time to the first batch after a resume; ours, from the recipe on = 1")
    curves = [
        (replay, OTHERS, "a tokenising stream: reads again what came before", {}),
        (ours, OURS, "cpt, from the recipe to the batch, in the corpus", {}),
        (index, OURS, "cpt, the index alone, of 1,000,000,000 rows", {"linestyle": "--", "markerfacecolor": "white"}),
    ]
    for seconds, color, label, style in curves:
        places = [place for place in seconds if place]
        line(axes, places, [seconds[place] / unit for place in places], color, label=label, **style)
    axes.set_xscale("log")
    by_decades(axes, min(index.values()) / unit / 4, max(replay.values()) / unit * 3)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("rows of 2,048 tokens before the position")
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.93))
    return figure


def shuffle(results: Results) -> Figure | None:
    """How far apart neighbours in training are in the corpus, as multiples of a permutation's."""
    orders: dict[str, Any] = results.get("shuffle", {}).get("orders", {})
    if not orders:
        return None
    size = f"{results['shuffle']['megabytes']:.0f} MB"
    figure, (axes,) = new_figure(
        0.42 * len(orders) + 0.8, f"How far apart in a corpus of {size} neighbours in training are; random order = 1"
    )
    values = {ORDERS.get(name, f"shuffle {name}"): one["mean"] for name, one in reversed(orders.items())}
    bars(
        axes,
        list(values),
        list(values.values()),
        [color_of(name) for name in reversed(orders)],
        [f"{value:.2f}" for value in values.values()],
    )
    return figure


if __name__ == "__main__":
    main()
