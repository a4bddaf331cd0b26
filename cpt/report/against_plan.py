"""What `cpt plan` expected when the run began, beside what was measured: memory, speed and time."""

from cpt.report.facts import seconds_in_steps
from cpt.report.found import number, numbers, text
from cpt.report.record import Record
from cpt.report.telling import told, told_share
from cpt.runs.page import Part, Section, Table
from cpt.runs.plots import Bars

PEAK = "gpu_memory_peak_gib"
GPU, HOST, SPEED, TIME = (
    "GPU memory, peak (GiB)",
    "host memory (GiB)",
    "tokens per second",
    "time in training steps (s)",
)


def against_plan(record: Record) -> Section:
    """Bars of the GPU's memory, and a table of all; empty where nothing was planned and no GPU was measured."""
    planned, measured = planned_figures(record), measured_figures(record)
    if not planned and GPU not in measured:
        return Section("Memory and speed against the plan", [])
    parts: list[Part] = [*bars(record, measured)]
    if not planned:
        parts.append("The run's folder holds no plan, so there is nothing to hold the measured memory against.")
    elif GPU not in measured:
        parts.append("The peak of the GPU's memory was not measured.")
    rows = [
        (name, told(planned.get(name)), told(measured.get(name)), ratio(planned.get(name), measured.get(name)))
        for name in planned | measured
    ]
    parts.append(Table(("", "planned", "measured", "measured / planned"), rows))
    if assumed := number(record.plan, "assumed_mfu"):
        parts.append(
            f"The planned speed takes {told_share(assumed)} of the GPU's peak for granted; it is an estimate, not a"
            " measurement."
        )
    return Section("Memory and speed against the plan", parts)


def planned_figures(record: Record) -> dict[str, float]:
    """Of plan.json."""
    speed = number(record.plan, "tokens_per_second")
    figures = {
        GPU: number(record.plan, "gpu_total_gib") or sum(memory_parts(record).values()) or None,
        HOST: number(record.plan, "host_total_gib"),
        SPEED: speed,
        TIME: record.tokens / speed if speed and record.tokens else None,
    }
    return {name: value for name, value in figures.items() if value is not None}


def measured_figures(record: Record) -> dict[str, float]:
    """Of metrics.jsonl: the highest of memory, the mean of speed."""
    figures = {}
    for called, name in ((GPU, PEAK), (HOST, "host_memory_gib")):
        values = record.metrics.curve(name)[1]
        if len(values):
            figures[called] = float(values.max())
    seconds = seconds_in_steps(record)
    if seconds and record.tokens:
        figures |= {SPEED: record.tokens / seconds, TIME: seconds}
    return figures


def memory_parts(record: Record) -> dict[str, float]:
    """Planned GiB of one GPU at the moment that takes most, by part."""
    return numbers(record.plan, "gpu_memory_gib")


def bars(record: Record, measured: dict[str, float]) -> list[Bars]:
    """What each part was to take, on top of each other, beside the measured peak."""
    parts, peak = memory_parts(record), measured.get(GPU)
    if not parts or peak is None:
        return []
    series: dict[str, list[float | None]] = {name: [value, None] for name, value in parts.items()}
    moment = text(record.plan, "moment")
    note = f"Planned: the moment that takes most, {moment}." if moment else ""
    return [
        Bars(
            "Memory of one GPU",
            "GiB",
            ["planned", "measured peak"],
            {**series, "measured peak": [None, peak]},
            stacked=True,
            note=note,
        )
    ]


def ratio(planned: float | None, measured: float | None) -> str:
    """Of 1."""
    return f"{measured / planned:.2f}" if planned and measured is not None else ""
