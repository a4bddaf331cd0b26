"""`python -m benchmarks.gpu.page [RESULTS...]`: the results in docs/gpu.md, between two markers."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.gates import GIB, format_gates, gates_of
from benchmarks.gpu.roofline import FORECAST
from benchmarks.marked import with_part

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "gpu.md", ROOT / "benchmarks" / "results" / "gpu.jsonl"
BEGIN, END = "<!-- python -m benchmarks.gpu.page: begin -->\n", "<!-- python -m benchmarks.gpu.page: end -->\n"
NOT_RUN = "Not run: no result of a GPU is here yet.\n"


def main() -> None:
    """Write the results between their markers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.page", description=__doc__)
    parser.add_argument("results", type=Path, nargs="*", default=[RESULTS])
    lines = [line for path in parser.parse_args().results for line in read_lines(path) if not line.get("dry_run")]
    part = f"```\n{format_results(lines)}\n```\n" if lines else NOT_RUN
    PAGE.write_text(with_part(PAGE.read_text(encoding="utf-8"), BEGIN, END, part, PAGE.name), encoding="utf-8")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All results of a file, in the order in which they came."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def format_results(lines: Sequence[dict[str, Any]]) -> str:
    """All results as text: tests, small measurements with their predictions, runs with their forecast, commands, gates."""
    parts: list[str] = []
    for line in newest(lines, "tests"):
        parts.append(f"tests, {line['name']}: {line['summary']}" + "".join(f"\n  failed: {test}" for test in line["failed_tests"]))
    small = newest(lines, "micro")
    if small:
        parts += ["", f"{'measurement':44}{'predicted':>12}{'measured':>12}"]
    for line in small:
        predicted = "" if line["predicted"] is None else f"{line['predicted']:.4g}"
        measured = f"{line['measured']:.4g} {line['unit']}" if "measured" in line else line["failed"][:60]
        parts.append(f"{line['name']:44}{predicted:>12}  {measured:>10}")
    runs = [line for line in lines if "system" in line]
    if runs:
        parts += [
            "",
            f"{'run':14}{'parts':>6}{'tokens/s':>12}{'MFU':>8}{'forecast':>10}{'peak GiB':>10}{'plan GiB':>10}{'waits':>7}{'idle':>7}",
        ]
    last = {(line["case"], line["system"], line["parts"]): line for line in runs}
    parts += [format_run(last[key]) for key in sorted(last)]
    for line in newest(lines, "command"):
        found = line.get("failed") or f"losses {' '.join(f'{loss:.4f}' for loss in line['losses'])}"
        peak = f", peak {line['peak_reserved'] / GIB:.1f} GiB reserved, nvidia-smi {line['nvidia_smi']}" if "peak_reserved" in line else ""
        parts.append(f"{line['name']}: {found}{peak}, {line.get('evaluations', 0)} evaluations")
    parts += [f"problem, {line['name']}: {line['failed']}" for line in newest(lines, "problem")]
    return "\n".join([*parts, "", format_gates(gates_of(runs))])


def newest(lines: Sequence[dict[str, Any]], step: str) -> list[dict[str, Any]]:
    """The last line of each name."""
    return list({line["name"]: line for line in lines if line.get("step") == step}.values())


def format_run(run: dict[str, Any]) -> str:
    """One line of the table."""
    name = f"{run['case']} {run['system']:9}{run['parts']:>9}"
    if "failed" in run:
        return f"{name}  {run['failed']}"
    shares = [f"{100 * run[key]:.1f} %" if run.get(key) is not None else "" for key in ("mfu", "host_gap")]
    memory = [f"{run[key] / GIB:.1f}" if key in run else "" for key in ("peak_allocated", "planned_peak")]
    forecast = forecast_of(run["case"], run["system"])
    waits = f"{run['waits_per_step']:.1f}" if "waits_per_step" in run else ""
    expected = "" if forecast is None else f"{100 * forecast:.1f} %"
    return f"{name}{run['tokens_per_second']:12,.0f}{shares[0]:>8}{expected:>10}{memory[0]:>10}{memory[1]:>10}{waits:>7}{shares[1]:>7}"


def forecast_of(case: str, system: str) -> float | None:
    """Strict MFU that the roofline expects."""
    label = {"cpt": "+ one-kernel AdamW", "trainer": "default Trainer", "bare": "bare loop"}.get(system)
    rows = json.loads(FORECAST.read_text())["results"] if FORECAST.exists() else []
    return next((row["mfu"] for row in rows if row["name"] == f"{case}: {label}"), None)


if __name__ == "__main__":
    main()
