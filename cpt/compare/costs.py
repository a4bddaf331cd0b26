"""How far runs came, how fast they were, how much memory and time they took, and what happened to them."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from cpt.compare.record import Record
from cpt.compare.rows import Row, Topic, known
from cpt.runs.folder import Floats

UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def progress_topic(records: Sequence[Record]) -> Topic:
    """State, steps, tokens, starts, time."""
    steps = [record.metrics.last("step") for record in records]
    tokens = [record.metrics.last("tokens") for record in records]
    times = [seconds_of(record) for record in records]
    costs = [record.metrics.last("cost") for record in records]
    rows = [
        Row("stage", tuple(record.stage for record in records)),
        Row("state", tuple(record.state for record in records)),
        Row("steps", tuple(whole(value) for value in steps), tuple(steps)),
        Row("tokens", tuple(whole(value) for value in tokens), tuple(tokens)),
        Row(
            "time of the last start",
            tuple(None if value is None else told_seconds(value) for value in times),
            tuple(times),
        ),
        Row("cost", tuple(None if value is None else f"{value:.2f}" for value in costs), tuple(costs)),
    ]
    starts = [len(record.starts) for record in records]
    if max(starts) > 1:
        rows.append(
            Row(
                "starts",
                tuple(str(number) if number else None for number in starts),
                tuple(float(number) for number in starts),
            )
        )
    return known("How far they came", rows)


def speed_topic(records: Sequence[Record]) -> Topic:
    """Medians over all logs; memory at its highest."""
    rows = [
        figure_row(records, "tokens/s", "tokens_per_second", np.median, "{:,.0f}", relative=True),
        figure_row(records, "MFU (%)", "mfu", np.median, "{:.1f}", factor=100),
        figure_row(records, "step, median (s)", "step_seconds_p50", np.median, "{:.4g}", relative=True),
        figure_row(records, "step, 95th percentile (s)", "step_seconds_p95", np.median, "{:.4g}", relative=True),
        figure_row(records, "waiting for data (%)", "data_wait", np.median, "{:.2f}", factor=100),
        figure_row(records, "GPU memory, peak (GiB)", "gpu_memory_peak_gib", np.max, "{:.2f}"),
        figure_row(records, "host memory, peak (GiB)", "host_memory_gib", np.max, "{:.2f}"),
    ]
    return known("Speed and memory", rows)


def event_topic(records: Sequence[Record]) -> Topic:
    """How many of each kind."""
    counts = [Counter(str(event["kind"]) for event in record.events if "kind" in event) for record in records]
    kinds = sorted({kind for count in counts for kind in count})
    rows = [
        Row(kind, tuple(str(count[kind]) for count in counts), tuple(float(count[kind]) for count in counts))
        for kind in kinds
    ]
    return known("Events", rows)


def figure_row(
    records: Sequence[Record],
    title: str,
    name: str,
    summary: Callable[[Floats], float],
    form: str,
    *,
    factor: float = 1,
    relative: bool = False,
) -> Row:
    """One figure of each run.

    Args:
        relative: with the share by which it differs from the first run.
    """
    numbers = [
        float(summary(values)) * factor if len(values := record.metrics.curve(name)[1]) else None for record in records
    ]
    told = [None if number is None else form.format(number) for number in numbers]
    first = numbers[0]
    if relative and first:
        told[1:] = [
            f"{text} ({number / first - 1:+.1%})" if number is not None else None
            for text, number in zip(told[1:], numbers[1:], strict=True)
        ]
    return Row(title, tuple(told), tuple(numbers))


def seconds_of(record: Record) -> float | None:
    """As the status or the Trainer tells, with loading and evaluation."""
    seconds = record.status.get("seconds")
    if isinstance(seconds, int | float) and not isinstance(seconds, bool):
        return float(seconds)
    return record.metrics.last("train_runtime")


def told_seconds(seconds: float) -> str:
    """`3 min 20 s`."""
    for large, name, small, other in UNITS:
        if seconds >= large:
            return f"{seconds // large:.0f} {name} {seconds % large // small:.0f} {other}"
    return f"{seconds:.1f} s"


def whole(number: float | None) -> str | None:
    """With commas."""
    return None if number is None else f"{number:,.0f}"
