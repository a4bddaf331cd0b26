"""`python -m benchmarks.data.plots`: the pictures of docs/pictures/ from benchmarks/results/data.json.

Times are told as multiples of something that was measured in the same run, because seconds of one machine say little about another.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.data.results import RESULTS, Results, by_position

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
OURS, OTHERS, RULE = "#0b6e4f", "#8d99ae", "#d7dbe2"
WIDTH, DPI = 9.0, 110  # inches and dots: legible at the width of a README
STYLE = {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#555555", "axes.titlesize": 13}


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


def new_figure(height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """White and opaque, so that it can be read on a dark page too."""
    figure = Figure((WIDTH, height), DPI, facecolor="white", layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def cold_throughput(results: Results) -> Figure | None:
    """A bar for each system: text a second, from the jsonl file to the last batch, as a multiple of run_clm's."""
    speeds = {name: one for name, one in results["systems"].items() if "failed" not in one}
    if "run_clm" not in speeds or len(speeds) < 2:
        return None
    unit = speeds["run_clm"]["megabytes_per_second"]
    ordered = sorted(speeds.items(), key=lambda item: item[1]["megabytes_per_second"])
    figure, (axes,) = new_figure(0.5 * len(ordered) + 1.2)
    values = [one["megabytes_per_second"] / unit for _, one in ordered]
    bars = axes.barh(
        [plain(one["title"], name) for name, one in ordered], values, color=[color_of(name) for name, _ in ordered], height=0.68
    )
    axes.bar_label(bars, [f"{value:.2g}×" if value < 10 else f"{value:.0f}×" for value in values], padding=4)
    axes.set_xlim(0, 1.1 * max(values))
    axes.set_title("Cold: text a second from jsonl to the last batch (encoders: to ids), run_clm = 1", loc="left")
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    return figure


def plain(title: str, name: str) -> str:
    """A title without Markdown; what gives no batches says so."""
    return title.replace("`", "") + (", ids only" if name in ("gigatoken", "hugging_face") else "")


def color_of(name: str) -> str:
    """Ours stands out."""
    return OURS if name == "ours" else OTHERS


def growth(results: Results) -> Figure | None:
    """Against corpus size: time to the first batch, time to the last, and memory."""
    curves = {name: [point for point in results["growth"] if point["system"] == name] for name in ("ours", "run_clm_torch")}
    curves = {name: sorted(points, key=lambda point: point["megabytes"]) for name, points in curves.items()}
    if any(len(points) < 2 for points in curves.values()):
        return None
    figure, axes = new_figure(3.9, columns=3)
    unit = curves["run_clm_torch"][0]["first_batch_seconds"]
    for part, key, title in zip(
        axes, ("first_batch_seconds", "total_seconds"), ("Time to the first batch", "Time to the last batch"), strict=False
    ):
        for name, points in curves.items():
            times = [point[key] / unit for point in points]
            line(part, [point["megabytes"] for point in points], times, name)
        part.set_yscale("log")
        part.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        part.set_title(title, loc="left")
    smallest = curves["run_clm_torch"][0]["megabytes"]
    axes[0].set_ylabel(f"run_clm's first batch of {smallest} MB = 1")
    for name, points in curves.items():
        largest = [max(point["own_memory_mb"], point["worker_own_memory_mb"]) for point in points]
        line(axes[2], [point["megabytes"] for point in points], largest, name)
    axes[2].set_ylim(0)
    axes[2].set_title("Memory of the largest process, MB", loc="left")
    for part in axes:
        part.set_xscale("log")
        part.set_xticks(sorted({point["megabytes"] for points in curves.values() for point in points}))
        part.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        part.xaxis.set_minor_locator(NullLocator())
        part.set_xlabel("MB of text")
        part.grid(axis="y", color=RULE, linewidth=0.8)
        part.set_axisbelow(True)
    axes[0].legend(frameon=False, loc="upper left")
    return figure


def line(axes: Axes, x: list[float], y: list[float], name: str, label: str | None = None) -> None:
    """A curve with its points."""
    label = label or {"ours": "cpt", "run_clm_torch": "run_clm"}[name]
    axes.plot(x, y, color=color_of(name), marker="o", markersize=5, linewidth=2.2 if name == "ours" else 1.8, label=label)


def resume(results: Results) -> Figure | None:
    """Time from nothing to the first batch at a position, beside a stream that replays what came before."""
    ours, replay = (by_position(results.get(name, {})) for name in ("resume_synthetic", "resume_replay"))
    if len(ours) < 2 or len(replay) < 2:
        return None
    unit = ours.pop(0)
    figure, (axes,) = new_figure(4.2)
    line(axes, list(ours), [seconds / unit for seconds in ours.values()], "ours", "cpt: arithmetic on the row's number")
    replay.pop(0, None)
    times = [seconds / unit for seconds in replay.values()]
    line(axes, list(replay), times, "replay", "a tokenising stream: read again what came before")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(0.3, 30 * max(times))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}×" if value >= 1 else ""))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("rows of 2,048 tokens before the position")
    axes.set_title("Time to the first batch after a resume; ours at row 0 = 1", loc="left")
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.legend(frameon=False, loc="upper right")
    return figure


def shuffle(results: Results) -> Figure | None:
    """How many neighbours in training are neighbours in the corpus, as multiples of a permutation's."""
    orders: dict[str, Any] = results.get("shuffle", {}).get("orders", {})
    if not orders:
        return None
    names = {"ours": "cpt", "permutation": "drawn at random"}
    figure, (axes,) = new_figure(0.5 * len(orders) + 1.2)
    values = {names.get(name, f"shuffle {name}"): one["mean"] for name, one in reversed(orders.items())}
    colors = [OURS if name == "cpt" else OTHERS for name in values]
    bars = axes.barh(list(values), list(values.values()), color=colors, height=0.68)
    axes.bar_label(bars, [f"{value:.2f}" for value in values.values()], padding=4)
    axes.set_title("How far apart in the corpus neighbours in training are; a random order = 1", loc="left")
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
