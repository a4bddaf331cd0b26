"""One case by one system, once a line comes on standard input: CASE SYSTEM FOLDER OUT. Writes what it found as JSON."""

import argparse
import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import CASES, PEAK_FLOPS, REACHED_BY_MATRICES, SYSTEMS, Case, tiny
from benchmarks.gpu.corpus import Content, SingleDocuments, content_of
from benchmarks.gpu.flops import as_torchtitan, of_hardware, seen_by_each, strict
from benchmarks.gpu.systems import RUN, Start
from benchmarks.gpu.watch import Watch
from cpt.errors import ResourceError
from cpt.hardware import find_gpus
from cpt.models.config import config_from
from cpt.planner.activations import count_activations
from cpt.planner.facts import facts_of
from cpt.planner.memory import plan_memory
from cpt.planner.setup import setup_of

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "trl", "liger-kernel", "triton", "bitsandbytes", "deepspeed")
MOST_PARTS = 8
OUT_OF_MEMORY = "out of memory"


def main() -> None:
    """As the words say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--gib", type=float)
    asked = parser.parse_args()
    sys.stdin.readline()
    run_one(asked.case, asked.system, asked.folder, asked.out, parts=asked.parts, gib=asked.gib)


def run_one(name: str, system: str, folder: Path, out: Path, *, parts: int = 1, gib: float | None = None, is_dry: bool = False) -> None:
    """Train, and write what was found; where memory ends, that.

    Args:
        gib: of the GPU's memory, instead of the case's own bound.
    """
    case = tiny(CASES[name]) if is_dry else CASES[name]
    bound = gib or case.gib
    if bound is not None and not is_dry:
        torch.cuda.set_per_process_memory_fraction(min(1.0, bound * 2**30 / torch.cuda.get_device_properties(0).total_memory))
    if not is_dry:
        torch.set_float32_matmul_precision("high")
    watch = Watch(on_gpu=not is_dry, **({"warmup": 3, "timed": 8} if is_dry else {}))
    start = Start(case, folder, watch, parts, "aot_eager" if is_dry else "inductor")
    about = {"case": name, "system": system, "parts": parts, "gib": bound, "dry_run": is_dry, **machine()}
    try:
        RUN[system](start)
        found = {**about, **watch.finish(micro_batches=parts)}
        found |= figures(case, found, contents(start, system), system)
        if system == "cpt":
            found["planned_peak"] = planned_peak(start)
    except (torch.OutOfMemoryError, ResourceError) as problem:
        if not isinstance(problem, torch.OutOfMemoryError) and "memory" not in str(problem):
            raise
        found = {**about, "failed": OUT_OF_MEMORY}
    out.write_text(json.dumps(found))


def planned_peak(start: Start) -> float:
    """Bytes that `cpt plan` expects the model to take, beside what torch counts as allocated; varlen attention keeps what flash does."""
    attention = "flash_attention_2" if start.on_gpu else "sdpa"
    setup = setup_of(start.recipe, 1, None, attention=attention, on_cpu=not start.on_gpu)
    config = config_from(dict(start.case.config))
    return plan_memory(facts_of(config, setup.lora, setup.sequence_length), setup, count_activations(config, setup)).model_alone


def machine() -> dict[str, Any]:
    """What it ran on."""
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    gpus = find_gpus()  # without opening the device, so that the command that starts the runs can ask too
    device = gpus[0].name if gpus else f"{platform.machine()}, no GPU"
    return {"device": device, "libraries": found, "python": platform.python_version()}


def contents(start: Start, system: str) -> list[Content]:
    """Of each row that the timed steps read."""
    case, rows = start.case, start.data.rows
    per_step = case.documents if case.packed and system != "cpt" else case.rows
    steps = range(start.watch.warmup * per_step, (start.watch.warmup + start.watch.timed) * per_step)
    if case.packed and system != "cpt":
        documents = SingleDocuments(rows, case.steps * case.rows)
        return [Content([len(documents[number]["input_ids"])]) for number in steps]
    return [content_of(rows[number]) for number in steps]


def figures(case: Case, found: dict[str, Any], read: list[Content], system: str) -> dict[str, Any]:
    """Tokens a second without padding, and what shares of the peak they make.

    Args:
        found: the time of a step.
        read: the rows of the timed steps.
    """
    lengths = [length for row in read for length in row.lengths]
    steps = len(read) / (case.documents if case.packed and system != "cpt" else case.rows)
    speed = sum(lengths) / steps / found["step_seconds"]
    seen = seen_by_each(lengths)
    of_token = strict(case.config, seen)
    again = bool(case.training.get("gradient_checkpointing")) if system == "cpt" else case.checkpoints
    selective = system == "cpt" and bool(case.training.get("gradient_checkpointing_kwargs", {}).get("selective"))
    made = of_hardware(case.config, seen, adapters=case.lora is not None, again=again, attention_again=not selective)
    whole = case.tokens if not case.packed or system == "cpt" else max(lengths)
    return {
        "tokens_per_second": speed,
        "tokens_per_step": sum(lengths) / steps,
        "mfu": None if case.lora else speed * of_token / PEAK_FLOPS,
        "mfu_as_torchtitan": None if case.lora else speed * as_torchtitan(case.config, case.tokens) / PEAK_FLOPS,
        "hfu": speed * made / PEAK_FLOPS,
        "of_what_matrices_reach": speed * made / REACHED_BY_MATRICES,
        "packing_efficiency": sum(lengths) / (len(read) * whole),
    }


if __name__ == "__main__":
    main()
