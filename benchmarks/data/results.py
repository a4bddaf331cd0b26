"""From the raw samples to benchmarks/results/data.json: medians, and ratios with their targets."""

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.data.corpus import Facts
from benchmarks.data.environments import python_of
from benchmarks.data.systems import SYSTEMS, System
from benchmarks.measurement import write_samples
from cpt.data.store.parallel import num_workers

RESULTS = Path(__file__).parents[1] / "results"
Results = dict[str, Any]
LIBRARIES = ("torch", "transformers", "tokenizers", "gigatoken", "datasets", "orjson", "numpy")


def write_results(
    folder: Path, samples: Results, corpora: dict[int, Facts], minutes: float
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_samples("data", samples)
    (folder / "data.json").write_text(
        json.dumps(results_of(samples, corpora, minutes), indent=1) + "\n"
    )


def results_of(samples: Results, corpora: dict[int, Facts], minutes: float) -> Results:
    """Everything that the tables and a reader need."""
    systems = {name: medians(name, sample, corpora) for name, sample in samples["systems"].items()}
    results = {
        "device": device(),
        "minutes": minutes,
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in LIBRARIES},
        "corpora": corpora,
        "systems": systems,
        "waste": wasted(samples.get("waste", {})),
        "growth": grown(samples["growth"]),
        "failures": failures(samples),
        **{name: some for name, some in samples.items() if name.startswith(("resume", "mixture"))},
    }
    return {**results, "measurements": measurements(results)}


def medians(name: str, sample: Results, corpora: dict[int, Facts]) -> Results:
    system, cold, warm = SYSTEMS[name], sample["cold"], sample["warm"]
    megabytes = corpora[sample["megabytes"]]["text_megabytes"]
    found: Results = {
        "title": system.title,
        "version": version_of(system),
        "megabytes": megabytes,
        "repetitions": len(cold),
    }
    if sample["failed"]:
        return {**found, "failed": sample["failed"]}
    if not cold:
        return {**found, "failed": "not measured"}
    found |= {f"cold_{key}": median(one[key] for one in cold) for key in cold[0]}
    found |= {f"warm_{key}": median(one[key] for one in warm) for key in (warm[0] if warm else {})}
    found["memory_mb"] = max(
        max(one["own_memory_mb"], one["worker_own_memory_mb"]) for one in (*cold, *warm)
    )
    return {
        **found,
        "megabytes_per_second": megabytes / found["cold_total_seconds"],
        "spread": spread([s["total_seconds"] for s in cold]),
    }


def spread(seconds: list[float]) -> float:
    return max(seconds) / min(seconds)


def version_of(system: System) -> str:
    """Of what is measured, in the environment where it runs; empty where that is not made."""
    if system.environment is None:
        return metadata.version(system.package)
    program = f"from importlib.metadata import version; print(version('{system.package}'))"
    try:
        return subprocess.run(
            [str(python_of(system.environment)), "-c", program], capture_output=True, text=True
        ).stdout.strip()
    except OSError:
        return ""


def wasted(sample: Results) -> Results:
    """Shares of padding and of tokens that are in no row, and how many documents are cut."""
    encoded = sample.get("encoded", {})
    found = {}
    for name, counts in sample.get("systems", {}).items():
        if "failed" in counts or "failed" in encoded:
            continue
        ends = encoded["documents"] if SYSTEMS[name].ends_documents else 0
        lost = 1 - counts["tokens"] / (encoded["tokens"] + ends)
        # Without a token at its end nobody can tell where a document was cut.
        cuts = counts["pieces"] - encoded["documents"] if ends else None
        found[name] = {"padding": counts["padding"], "lost": lost, "cuts": cuts}
    return {
        "documents": encoded.get("documents"),
        "unavoidable_cuts": encoded.get("unavoidable_cuts"),
        "systems": found,
    }


def failures(samples: Results) -> dict[str, str]:
    """What could not be measured beside the systems themselves, and why."""
    points = {
        f"growth of {sample['system']} to {sample['megabytes']} MB": sample
        for sample in samples["growth"]
    }
    waste = {
        f"waste of {name}": counts
        for name, counts in samples.get("waste", {}).get("systems", {}).items()
    }
    single = {
        name: some for name, some in samples.items() if name.startswith(("resume", "mixture"))
    }
    return {
        name: some["failed"]
        for name, some in {**points, **waste, **single}.items()
        if "failed" in some
    }


def grown(samples: list[Results]) -> list[Results]:
    """The points of the growth curves: medians of their repetitions."""
    points: dict[tuple[str, int], list[Results]] = {
        (sample["system"], sample["megabytes"]): [] for sample in samples if "failed" not in sample
    }
    for sample in samples:
        if "failed" not in sample:
            points[sample["system"], sample["megabytes"]].append(sample)
    keys = (
        "first_batch_seconds",
        "total_seconds",
        "peak_memory_mb",
        "own_memory_mb",
        "worker_peak_memory_mb",
        "worker_own_memory_mb",
    )
    return [
        {
            "system": name,
            "megabytes": size,
            "repetitions": len(some),
            **{key: median(one[key] for one in some) for key in keys},
        }
        for (name, size), some in points.items()
    ]


def measurements(results: Results) -> list[Results]:
    """Ratios and figures with their targets, those that can be told."""
    rows = [*speed(results), *resuming(results), *quality(results), *memory(results)]
    return [measurement(*row) for row in rows]


Row = tuple[str, str | None, float, str]


def speed(results: Results) -> list[Row]:
    """Cold and warm, compared with each of the others."""
    systems = {
        name: system for name, system in results["systems"].items() if "failed" not in system
    }
    if "ours" not in systems:
        return []
    ours, rows = systems.pop("ours"), []
    if whole := systems.pop("ours_whole", None):
        rows += to_the_whole_store(whole, systems)
    targets = {
        "hugging_face": ">= 10",
        "run_clm": ">= 25",
        "datatrove": ">= 15",
        "gigatoken": ">= 0.5",
    }
    for name, other in systems.items():
        ratio = ours["megabytes_per_second"] / other["megabytes_per_second"]
        rows.append(
            (f"cold, jsonl to the last batch / {other['title']}", targets.get(name), ratio, "times")
        )
    if "gigatoken" in systems:
        parsing = (
            systems["gigatoken"]["cold_json_seconds"] / num_workers() / ours["cold_total_seconds"]
        )
        rows.append(
            ("share of parsing JSON, spread over the cores, in cold", None, parsing, "share")
        )
    if "run_clm" in systems:
        first = ours["cold_first_batch_seconds"] / systems["run_clm"]["cold_first_batch_seconds"]
        sizes = (
            f"{ours['megabytes']:.0f} MB / run_clm's of {systems['run_clm']['megabytes']:.0f} MB"
        )
        rows.append((f"cold time to the first batch of {sizes}", "<= 0.15", first, "times"))
    targets = {"run_clm": ">= 5", "datatrove": ">= 1", "litdata": ">= 1"}
    for name, other in systems.items():
        if "warm_steady_tokens_per_second" in other:
            ratio = ours["warm_steady_tokens_per_second"] / other["warm_steady_tokens_per_second"]
            rows.append(
                (f"warm, batches in a row / {other['title']}", targets.get(name), ratio, "times")
            )
    return rows


def to_the_whole_store(whole: Results, systems: Results) -> list[Row]:
    """Beside encoders, without reading the rows: they give none either."""
    speed = whole["megabytes"] / whole["cold_first_batch_seconds"]
    names = [name for name in ("hugging_face", "gigatoken") if name in systems]
    titles = {
        name: f"cold, jsonl to all in the store, packed, and a batch / {systems[name]['title']}"
        for name in names
    }
    return [
        (title, None, speed / systems[name]["megabytes_per_second"], "times")
        for name, title in titles.items()
    ]


def resuming(results: Results) -> list[Row]:
    rows: list[Row] = []
    titles = {
        "resume": "slowest resume at 10, 50 and 90 % of the corpus",
        "resume_synthetic": "slowest resume at positions to 10^9",
    }
    for name, title in titles.items():
        if seconds := by_position(results.get(name, {})):
            rows.append((title, "<= 1", max(seconds.values()), "s"))
    return rows


def by_position(measured: Results) -> dict[float, float]:
    """Of what a program said, the seconds by position."""
    return {float(key): value for key, value in measured.items() if key[0].isdigit()}


def quality(results: Results) -> list[Row]:
    rows: list[Row] = []
    if ours := results["waste"]["systems"].get("ours"):
        rows.append(("padding", "<= 0.003", ours["padding"], "share"))
        rows.append(("tokens lost", "<= 0.003", ours["lost"], "share"))
        rows.append(
            (
                "cuts of documents / the unavoidable ones",
                "<= 1",
                ours["cuts"] / results["waste"]["unavoidable_cuts"],
                "times",
            )
        )
    if "ours" in (mixture := results.get("mixture", {})):
        error = max(abs(share - mixture["asked"][name]) for name, share in mixture["ours"].items())
        rows.append(
            (
                f"mixture: largest error of a share after {mixture['tokens'] / 1e6:.0f}M tokens",
                "<= 0.1",
                100 * error,
                "points",
            )
        )
    return rows


def memory(results: Results) -> list[Row]:
    """Of the growth curves: the largest corpus, and beside smaller ones."""
    curve = sorted(
        (point for point in results["growth"] if point["system"] == "ours"),
        key=lambda point: point["megabytes"],
    )
    if len(curve) < 2:
        return []
    before, last = curve[-2:]
    sizes = f"{last['megabytes']} MB / of {before['megabytes']} MB"
    own = max(last["own_memory_mb"], last["worker_own_memory_mb"])
    peak = max(last["peak_memory_mb"], last["worker_peak_memory_mb"])
    return [
        (
            f"cold time to the first batch of {sizes}",
            "<= 1.2",
            last["first_batch_seconds"] / before["first_batch_seconds"],
            "times",
        ),
        (f"most memory of a process, {last['megabytes']} MB", "<= 600", own, "MB"),
        (
            "the same, including the pages of mapped files, which the system can drop at any time",
            "<= 600",
            peak,
            "MB",
        ),
    ]


def measurement(name: str, target: str | None, measured: float, unit: str) -> Results:
    met = None
    if target is not None:
        sign, _, bound = target.partition(" ")
        met = measured >= float(bound) if sign == ">=" else measured <= float(bound)
    return {"name": name, "target": target, "measured": measured, "unit": unit, "met": met}


def device() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    return f"{model}, {num_workers()} cores, load before the end {os.getloadavg()[1]:.1f}"
