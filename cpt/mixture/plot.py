"""Draw a forecast: the shares asked and seen, the lengths of documents, and how shares change from phase to phase."""

from pathlib import Path
from typing import Any

from cpt.errors import ResourceError
from cpt.mixture.forecast import Forecast


def plot_forecast(forecast: Forecast, path: Path) -> None:
    """Write a picture; its format follows from the name.

    Raises:
        ResourceError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot: no display, no state
    except ImportError as problem:
        raise ResourceError("`--plot` needs matplotlib. Install it: pip install 'cpt[plots]'") from problem
    panels = 3 if forecast.phases else 2
    figure = Figure(figsize=(6 * panels, 1.5 + max(3.5, 0.35 * len(forecast.sources))), layout="constrained")
    axes: Any = figure.subplots(1, panels)
    draw_shares(forecast, axes[0])
    draw_lengths(forecast, axes[1])
    if forecast.phases:
        draw_phases(forecast, axes[2])
    figure.suptitle(f"What {forecast.name} will read: {forecast.tokens:,} tokens")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as problem:
        raise ResourceError(
            f"{path}: cannot write the picture ({problem}). Give `--plot` the name of a .png file."
        ) from problem


def draw_shares(forecast: Forecast, axes: Any) -> None:
    """Two bars for each source, with its epochs."""
    places = range(len(forecast.sources))
    axes.barh(
        [place - 0.2 for place in places],
        [100 * source.asked for source in forecast.sources],
        0.4,
        label="asked",
        color="0.75",
    )
    bars = axes.barh(
        [place + 0.2 for place in places], [100 * source.seen for source in forecast.sources], 0.4, label="seen"
    )
    axes.bar_label(bars, [f"read {source.epochs:.2f} times" for source in forecast.sources], padding=3, fontsize=8)
    axes.set_yticks(list(places), [source.name for source in forecast.sources])
    axes.set_xlim(0, 125 * max(source.seen for source in forecast.sources))
    axes.invert_yaxis()
    axes.set_xlabel("share of the run's tokens (%)")
    axes.legend(fontsize=8)


def draw_lengths(forecast: Forecast, axes: Any) -> None:
    """A line for each source."""
    for source in forecast.sources:
        shortest, longest = min(source.lengths).bit_length() - 1, max(source.lengths).bit_length()
        lengths = [2**exponent for exponent in range(shortest, longest + 1)]
        axes.step(
            lengths,
            [100 * source.lengths.get(length, 0) / source.documents for length in lengths],
            where="post",
            label=source.name,
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens in a document")
    axes.set_ylabel("share of the source's documents (%)")
    axes.legend(fontsize=8)


def draw_phases(forecast: Forecast, axes: Any) -> None:
    """A band for each source over the run's tokens."""
    edges = [part.first_token for part in forecast.course] + [forecast.course[-1].end_token]
    shares = [[100 * part.seen[source.name] for part in forecast.course] for source in forecast.sources]
    axes.stackplot(
        edges,
        [[*share, share[-1]] for share in shares],
        step="post",
        labels=[source.name for source in forecast.sources],
    )
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 100)
    axes.set_xlabel("tokens of the run")
    axes.set_ylabel("share of the tokens, as the run goes on (%)")
    axes.legend(fontsize=8, loc="upper right")
