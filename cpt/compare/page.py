"""A comparison as one HTML page, with the runs' curves over tokens."""

from collections.abc import Iterator

import numpy as np

from cpt.compare.comparison import Comparison, comparable_losses
from cpt.compare.curves import SMOOTHED_OVER, LossCurve
from cpt.compare.held_out import sets_of
from cpt.compare.layout import TextTable, tables_of
from cpt.compare.record import Record
from cpt.runs.folder import BITS_PER_BYTE, EVALUATED
from cpt.runs.page import Listing, Part, Section, Table, html_page
from cpt.runs.plots import Curve, Plot

FEWEST_TO_SMOOTH = 30
SPEED_SMOOTHED_OVER = 0.02


def comparison_page(comparison: Comparison) -> str:
    """The whole page.

    Raises:
        ResourceError: there are curves, and plotly is not installed.
    """
    differences, figures = tables_of(comparison)
    sections = [
        Section("What differs", [part for table in differences for part in parts_of(table)]),
        Section("Curves", list(plots_of(comparison))),
        Section("Figures", [part for table in figures for part in parts_of(table)]),
        Section("Not compared", [Listing(comparison.not_compared)] if comparison.not_compared else []),
    ]
    return html_page(comparison.title, sections, comparison.headline())


def parts_of(table: TextTable) -> Iterator[Part]:
    """Table and remarks."""
    if table.rows:
        yield Table(table.columns, table.rows, table.title)
    if table.remarks:
        yield Listing(table.remarks)


def plots_of(comparison: Comparison) -> Iterator[Plot]:
    """Losses, held-out sets and speed over tokens, a curve for each run."""
    fits = comparable_losses(comparison.records, [])
    losses = [record for record, comparable in zip(comparison.records, fits, strict=True) if comparable]
    yield from plot("Training loss", "nats per token", [smoothed(record, "loss", SMOOTHED_OVER) for record in losses])
    for name in sets_of(comparison.records):
        curves = [
            Curve(record.name, *record.metrics.curve(f"{EVALUATED}{name}{BITS_PER_BYTE}"))
            for record in comparison.records
        ]
        yield from plot(f"Held-out text: {name}", "bits per byte", curves)
    yield from plot(
        "Speed",
        "tokens/s",
        [smoothed(record, "tokens_per_second", SPEED_SMOOTHED_OVER) for record in comparison.records],
    )


def plot(title: str, y_title: str, curves: list[Curve]) -> Iterator[Plot]:
    """Of the runs that logged it."""
    there = [curve for curve in curves if len(np.asarray(curve.x))]
    if there:
        yield Plot(title, "tokens", y_title, there)


def smoothed(record: Record, name: str, share: float) -> Curve:
    """At each log the mean over a share of the run's tokens before it; few logs stay as they are."""
    tokens, values = record.metrics.curve(name)
    if len(tokens) >= FEWEST_TO_SMOOTH:
        values = LossCurve(tokens, values).smoothed(share * float(tokens[-1]))
    return Curve(record.name, tokens, values)
