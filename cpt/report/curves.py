"""Plots of what was logged while the run trained: loss, speed, memory, hardware, and what a stage of examples logs
besides."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cpt.report.found import text
from cpt.report.happened import marks
from cpt.report.record import Record
from cpt.runs.page import Section
from cpt.runs.plots import Curve, Floats, Plot

SMOOTHED_OVER = 0.02  # of the lines, where the run logged no smoothed loss
FEWEST_TO_SMOOTH = 30
STAGES_OF_TEXT = ("cpt", "pretrain", "sft")
MOST_OTHERS = 24
MOST_IN_ONE = 8


@dataclass(frozen=True)
class Drawn:
    """One plot of figures that belong together."""

    title: str
    y_title: str
    figures: dict[str, str]
    """Name in metrics.jsonl -> what it is called."""
    factor: float = 1.0
    note: str = ""


TRAINING = (
    Drawn("Learning rate", "learning rate", {"learning_rate": "learning rate"}),
    Drawn("Gradient norm", "norm before clipping", {"grad_norm": "gradient norm"}),
)
SPEED = (
    Drawn(
        "Tokens per second",
        "tokens/s",
        {"tokens_per_second": "tokens/s"},
        note="Of training steps alone; evaluation and saving left out.",
    ),
    Drawn("Model FLOPs utilisation", "MFU (%)", {"mfu": "MFU"}, 100),
    Drawn("Waiting for data", "share of the time (%)", {"data_wait": "waiting for data"}, 100),
    Drawn("Time of a step", "seconds", {"step_seconds_p50": "median", "step_seconds_p95": "95th percentile"}),
    Drawn(
        "GPU memory",
        "GiB",
        {
            "gpu_memory_peak_gib": "peak",
            "gpu_memory_reserved_gib": "reserved",
            "gpu_memory_allocated_gib": "allocated",
        },
    ),
    Drawn("Host memory", "GiB", {"host_memory_gib": "host memory"}),
    Drawn("GPU use", "%", {"gpu_utilization_percent": "GPU use"}),
    Drawn("GPU temperature", "°C", {"gpu_temperature_celsius": "temperature"}),
    Drawn("GPU power", "W", {"gpu_power_watts": "power"}),
    Drawn("Processor use", "%", {"cpu_percent": "processor use"}),
    Drawn("Disk", "MiB/s", {"disk_read_mib_per_second": "read", "disk_written_mib_per_second": "written"}),
    Drawn("Network", "MiB/s", {"network_received_mib_per_second": "received", "network_sent_mib_per_second": "sent"}),
)
KNOWN = {name for drawn in (*TRAINING, *SPEED) for name in drawn.figures} | {
    *(
        "step",
        "tokens",
        "epoch",
        "loss",
        "loss_smoothed",
        "num_tokens",
        "total_flos",
        "seconds_to_go",
        "cost",
        "cost_to_go",
    ),
}
NOT_CURVES = ("eval_", "share_", "tokens_", "loss_", "train_")
FIRST = "reward"
APART = ("accurac", "ratio", "frac")  # figures between 0 and 1, lost beside larger ones


def training(record: Record) -> Section:
    """Loss with what happened, learning rate, gradient norm, and the loss of each source."""
    plots = [*loss_plot(record), *drawn_plots(record, TRAINING), *source_losses(record)]
    return Section("Training", plots)


def stage_figures(record: Record) -> Section:
    """What only some stages log: rewards, margins, accuracies, KL, lengths. Figures of one family stand in one
    plot."""
    families: dict[str, list[str]] = {}
    names = [name for name in record.metrics.names if name not in KNOWN and not name.startswith(NOT_CURVES)]
    for name in sorted(names, key=lambda name: not name.startswith(FIRST)):
        family, _, figure = name.rpartition("/")
        is_apart = not family or any(word in figure for word in APART)
        families.setdefault(name if is_apart else family, []).append(name)
    groups = [
        (family, names[first : first + MOST_IN_ONE])
        for family, names in families.items()
        for first in range(0, len(names), MOST_IN_ONE)
    ]
    drawn = [Drawn(family, "", {name: name.removeprefix(f"{family}/") for name in names}) for family, names in groups]
    left_out = (
        [f"Not drawn: {', '.join(one.title for one in drawn[MOST_OTHERS:])}."] if len(drawn) > MOST_OTHERS else []
    )
    return Section("Figures of this stage", [*drawn_plots(record, drawn[:MOST_OTHERS]), *left_out])


def speed(record: Record) -> Section:
    """Whether the hardware was used."""
    return Section("Speed and hardware", list(drawn_plots(record, SPEED, from_zero=True)))


def drawn_plots(record: Record, all_drawn: Sequence[Drawn], *, from_zero: bool = False) -> Iterator[Plot]:
    """A plot for each of which a figure was logged."""
    for drawn in all_drawn:
        curves = []
        for name, called in drawn.figures.items():
            tokens, values = record.metrics.curve(name)
            if len(tokens):
                curves.append(Curve(called, tokens, values * drawn.factor))
        if curves:
            yield Plot(drawn.title, "tokens", drawn.y_title, curves, note=drawn.note, from_zero=from_zero)


def loss_plot(record: Record) -> Iterator[Plot]:
    """Raw loss, pale behind the smoothed one, with the run's events."""
    tokens, values = record.metrics.curve("loss")
    if not len(tokens):
        return
    smoothed_tokens, smoothed_values = record.metrics.curve("loss_smoothed")
    note = ""
    if not len(smoothed_tokens) and len(tokens) >= FEWEST_TO_SMOOTH:
        smoothed_tokens, smoothed_values = tokens, smoothed(values)
        note = f"Smoothed for this page: a moving mean over {SMOOTHED_OVER:.0%} of the lines."
    curves = [Curve("loss", tokens, values, faint=len(smoothed_tokens) > 0)]
    if len(smoothed_tokens):
        curves.append(Curve("smoothed", smoothed_tokens, smoothed_values))
    happened = marks(record)
    if happened:
        note = f"{note} Triangles: events of this run, told in the section on events.".strip()
    yield Plot("Training loss", "tokens", loss_unit(record), curves, marks=happened, note=note)


def smoothed(values: Floats) -> Floats:
    """The mean of each value's neighbours; at both ends of as many as there are."""
    reach = max(1, round(len(values) * SMOOTHED_OVER / 2))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    low, high = np.maximum(0, places - reach), np.minimum(len(values), places + reach + 1)
    means: Floats = (sums[high] - sums[low]) / (high - low)
    return means


def source_losses(record: Record) -> Iterator[Plot]:
    """Of each source, where the run logged it."""
    names = [name for name in record.metrics.names if name.startswith("loss_") and name != "loss_smoothed"]
    curves = [
        Curve(name.removeprefix("loss_"), *record.metrics.curve(name))
        for name in names
        if len(record.metrics.curve(name)[0])
    ]
    if curves:
        yield Plot("Training loss of each source", "tokens", loss_unit(record), curves)


def loss_unit(record: Record) -> str:
    """Of examples the loss is whatever their stage makes it."""
    return "nats per token" if text(record.recipe, "stage") in STAGES_OF_TEXT else "loss"
