"""The picture of docs/rewarming.md: what each arm learned against what it forgot."""

from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg

from benchmarks.data.plots import PICTURES, RULE, STYLE, new_figure
from benchmarks.rewarming.corpus import GENERAL
from benchmarks.rewarming.results import DOMAIN
from benchmarks.rewarming.training import BASE, JOINT, NO_REWARMING, REPLAY, REWARMING

PICTURE = PICTURES / "rewarming.png"
# Each arm has a form too, so that the picture can be read without its colours.
MARKS = {
    BASE: ("#555555", "o"),
    NO_REWARMING: ("#8d99ae", "s"),
    REWARMING: ("#d1495b", "^"),
    REPLAY: ("#0b6e4f", "D"),
    JOINT: ("#2e6fbb", "P"),
}


def draw(results: dict[str, Any], path: Path) -> None:
    """A panel for each shift: small marks are seeds, large ones their mean, bars its 95 % interval."""
    rcParams.update(STYLE)
    title = "Held-out bits per byte: left is learned, down is remembered (bars: 95 % over seeds)"
    figure, panels = new_figure(4.9, title, columns=len(results["shifts"]))
    for axes, shift in zip(panels, results["shifts"], strict=True):
        panel(axes, results["arms"][shift["name"]])
        axes.set_title(f"{shift['name']} shift: {shift['what']}", loc="left", fontsize=12)
        axes.set_xlabel("domain")
    panels[0].set_ylabel(GENERAL)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=11, columnspacing=1.2
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})


def panel(axes: Axes, arms: dict[str, Any]) -> None:
    """One shift; dashed lines go through the base."""
    axes.axvline(arms[BASE][DOMAIN]["mean"], color=RULE, linestyle="--", zorder=0)
    axes.axhline(arms[BASE][GENERAL]["mean"], color=RULE, linestyle="--", zorder=0)
    for arm, (color, form) in MARKS.items():
        domain, general = arms[arm][DOMAIN], arms[arm][GENERAL]
        axes.scatter(domain["values"], general["values"], s=16, color=color, marker=form, alpha=0.45, linewidths=0)
        axes.errorbar(
            domain["mean"],
            general["mean"],
            xerr=domain["reach"],
            yerr=general["reach"],
            color=color,
            marker=form,
            markersize=9,
            capsize=3,
            linewidth=1.4,
            linestyle="none",
            label=arm,
        )
