"""`python -m benchmarks.gpu.page [RESULTS...]`: write the results into benchmarks/README.md."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.gates import GIB, format_gates, gates_of
from benchmarks.gpu.processes import read_lines
from benchmarks.gpu.roofline import FORECAST
from benchmarks.gpu.trace import format_timeline
from benchmarks.readme import write_part

RESULTS = Path(__file__).parents[2] / "build" / "gpu" / "results.jsonl"
NOT_RUN = "No GPU has run it yet.\n"
Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.page", description=__doc__)
    parser.add_argument("results", type=Path, nargs="*", default=[RESULTS])
    lines = [
        line
        for path in parser.parse_args().results
        for line in read_lines(path)
        if not line.get("dry_run")
    ]
    part = f"```\n{format_results(lines)}\n```\n" if lines else NOT_RUN
    write_part("benchmarks.gpu.page", part)


def format_results(lines: Sequence[Line]) -> str:
    """All results as text: machines, tests, small measurements with their predictions, runs with their forecast,
    gates."""
    runs = [line for line in lines if "system" in line]
    versions = [
        f"{line['device']}: {format_versions(line['libraries'])}"
        for line in lines
        if "device" in line
    ]
    tests = [
        "\n  failed: ".join([f"tests, {one['name']}: {one['summary']}", *one["failed_tests"]])
        for one in newest(lines, "tests")
    ]
    small = [
        [
            one["name"],
            number(one["predicted"]),
            number(one.get("measured")),
            one.get("failed", one["unit"])[:60],
        ]
        for one in newest(lines, "micro")
    ]
    last = {(line["case"], line["system"], line["parts"]): line for line in runs}
    table = [[column(last[key]) for column in COLUMNS.values()] for key in sorted(last)]
    traced = [
        line["kernels"]
        for line in runs
        if (line["case"], line["system"]) == ("C", "cpt") and "kernels" in line
    ][:1]
    kernels = [
        f"{time:8.3f} ms {calls:5} x {name}" for found in traced for name, calls, time in found
    ]
    parts = [
        "\n".join(dict.fromkeys(versions)),
        "\n".join(
            f"cpt doctor: exit code {line['code']}"
            for line in lines
            if line.get("step") == "doctor"
        ),
        "\n".join(tests),
        format_table(["measurement", "predicted", "measured", "unit"], small),
        format_table(list(COLUMNS), table),
        "\n".join(["kernels of a step, C by cpt", *kernels] if kernels else []),
        "\n\n".join(
            f"{run['case']} by cpt, micro-batches {run['parts']}, {format_timeline(run['timeline'])}"
            for run in newest_traces(runs)
        ),
        "\n".join(
            f"problem, {line['name']}: {line['failed']}" for line in newest(lines, "problem")
        ),
        format_gates(gates_of(runs)),
    ]
    return "\n\n".join(part for part in parts if part)


def newest(lines: Sequence[Line], step: str) -> list[Line]:
    return list({line["name"]: line for line in lines if line.get("step") == step}.values())


def newest_traces(runs: Sequence[Line]) -> list[Line]:
    return list({(run["case"], run["parts"]): run for run in runs if "timeline" in run}.values())


def format_versions(libraries: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in libraries.items())


def format_table(heads: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [heads, *rows]
    ]
    return "\n".join(lines) if rows else ""


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def shown(key: str, form: str, unit: float = 1.0) -> Callable[[Line], str]:
    """A value of a run; empty if the device cannot measure it."""
    return lambda run: "" if run.get(key) is None else format(run[key] / unit, form)


def forecast_of(run: Line) -> str:
    """The strict MFU that the roofline expects."""
    label = {"trainer": "default Trainer", "bare": "bare loop"}.get(run["system"], run["system"])
    rows = json.loads(FORECAST.read_text())["results"]
    return next(
        (f"{row['mfu']:.1%}" for row in rows if row["name"] == f"{run['case']}: {label}"), ""
    )


COLUMNS: dict[str, Callable[[Line], str]] = {
    "run": lambda run: f"{run['case']} {run['system']}",
    "micro-batches": lambda run: str(run["parts"]),
    "tokens/s": lambda run: run.get("failed") or f"{run['tokens_per_second']:,.0f}",
    "MFU": shown("mfu", ".1%"),
    "forecast": forecast_of,
    "step ms": shown("p50", ".0f", 1e-3),
    "p95": shown("p95", ".0f", 1e-3),
    "peak GiB": shown("peak_allocated", ".1f", GIB),
    "plan": shown("planned_peak", ".1f", GIB),
    "reserved": shown("peak_reserved", ".1f", GIB),
    "on device": shown("used_on_device", ".1f", GIB),
    "waits": shown("waits_per_step", ".1f"),
    "idle": shown("host_gap", ".1%"),
    "first step s": shown("cold_start_seconds", ".0f"),
}


if __name__ == "__main__":
    main()
