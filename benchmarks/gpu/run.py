"""Run one case by one system when a line arrives on standard input: CASE SYSTEM FOLDER OUT. Writes its results as
JSON, and a trace of two of cpt's steps into TRACES."""

import argparse
import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import CASES, PEAK_FLOPS, SYSTEMS, Case, tiny
from benchmarks.gpu.corpus import lengths_in, single_documents
from benchmarks.gpu.flops import seen_by_each, strict
from benchmarks.gpu.systems import RUN, Start
from benchmarks.gpu.trace import reduce_trace, summarize_trace
from benchmarks.gpu.watch import Watch, limit_memory
from benchmarks.plan.dry_run import planned_bytes
from cpt.errors import ResourceError
from cpt.hardware import find_gpus
from cpt.models.config import config_from
from cpt.planning.workload import attention_on_gpu, read_setup

LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "liger-kernel",
    "triton",
    "bitsandbytes",
    "deepspeed",
)
OUT_OF_MEMORY = "out of memory"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    sys.stdin.readline()
    run_one(
        options.case,
        options.system,
        options.folder,
        options.out,
        options.traces,
        parts=options.parts,
        is_dry=options.dry_run,
    )


def run_one(
    name: str, system: str, folder: Path, out: Path, traces: Path, *, parts: int, is_dry: bool
) -> None:
    case = tiny(CASES[name]) if is_dry else CASES[name]
    if not is_dry:
        torch.set_float32_matmul_precision("high")
        limit_memory(case.gib)
    trace = traces / f"trace-{name}-{parts}.json.gz" if case.is_traced and system == "cpt" else None
    watch = Watch(on_gpu=not is_dry, timed=case.timed_steps, trace=trace)
    start = Start(case, folder, watch, parts)
    about = {
        "case": name,
        "system": system,
        "parts": parts,
        "gib": case.gib,
        "dry_run": is_dry,
        **machine(),
    }
    try:
        RUN[system](start)
        found = {
            **about,
            **watch.finish(micro_batches=parts),
            "corpus": (folder / "corpus.hash").read_text(),
        }
        found |= metrics_of(case, found, contents(start, system), system)
    except (torch.OutOfMemoryError, ResourceError) as problem:
        if not isinstance(problem, torch.OutOfMemoryError) and "memory" not in str(problem):
            raise
        found = {**about, "failed": OUT_OF_MEMORY}
    out.write_text(json.dumps(found))
    if (
        system == "cpt" and "failed" not in found
    ):  # last: a plan or a trace that fails must not cost the result
        found["planned_peak"] = planned_peak(start)
        out.write_text(json.dumps(found))
        if trace is not None:
            reduce_trace(trace)
            out.write_text(json.dumps({**found, "timeline": summarize_trace(trace)}))


def planned_peak(start: Start) -> float:
    """Bytes that `cpt plan` expects the model to take, as torch counts allocations."""
    config = config_from(dict(start.case.config))
    attention = attention_on_gpu(start.recipe, config) if start.on_gpu else "sdpa"
    setup = read_setup(start.recipe, 1, None, attention=attention, on_cpu=not start.on_gpu)
    return planned_bytes(config, setup)


def machine() -> dict[str, Any]:
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    gpus = find_gpus()  # without a CUDA context: the process that starts the runs calls this too
    device = gpus[0].name if gpus else f"{platform.machine()}, no GPU"
    return {"device": device, "libraries": found, "python": platform.python_version()}


def contents(start: Start, system: str) -> list[list[int]]:
    """Lengths of the documents in the rows of the timed steps, as the system reads them."""
    case, rows = start.case, start.data.rows
    per_step = items_per_step(case, system)
    timed = range(
        start.watch.warmup * per_step, (start.watch.warmup + start.watch.timed) * per_step
    )
    if per_step != case.rows:
        documents = single_documents(rows, case.steps * case.rows)
        return [[len(documents[number]["input_ids"])] for number in timed]
    return [lengths_in(rows[number]) for number in timed]


def items_per_step(case: Case, system: str) -> int:
    """Rows of a step; the default Trainer takes single documents where rows are packed."""
    return case.documents if case.packed and system in ("trainer", "liger") else case.rows


def metrics_of(
    case: Case, found: dict[str, Any], read: list[list[int]], system: str
) -> dict[str, Any]:
    """Tokens a second, padding not counted, and the share of the GPU's peak that they are.

    Args:
        found: holds the time of a step.
        read: rows of the timed steps.
    """
    lengths = [length for row in read for length in row]
    tokens = sum(lengths) / (len(read) / items_per_step(case, system))
    speed = tokens / found["step_seconds"]
    seen = seen_by_each(lengths)
    width = case.tokens if items_per_step(case, system) == case.rows else max(lengths)
    return {
        "tokens_per_second": speed,
        "tokens_per_step": tokens,
        "mfu": None if case.lora else speed * strict(case.config, seen) / PEAK_FLOPS,
        "packing_efficiency": sum(lengths) / (len(read) * width),
    }


if __name__ == "__main__":
    main()
