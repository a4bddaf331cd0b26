"""Does `cpt plan` add up what a step takes? `python -m benchmarks.plan`: 5 minutes on one core.

Each cell is a shipped model with a row length and a training setup. The sum (activations counted on micro-batches of
one and two rows, the rest from numbers of parameters) is compared with a dry run: two whole steps on fake tensors,
with every live storage added up. Both are of one process, without the reserves of engines, kernels and libraries.
Writes benchmarks/results/plan.json.
"""

import argparse
import json
import platform
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.plan.dry_run import dry_run, planned_bytes
from cpt.models.config import config_from
from cpt.planning.workload import Setup, Sharding
from cpt.recipe.tree import Mistakes, plain, read_yaml

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "plan.json"
MODELS = {
    "gpt2/124m": (1024,),
    "llama/1b": (2048, 8192),
    "qwen/7b": (4096,),
    "nemotron/8b": (4096,),
}
PLAIN = Setup(
    gpus=1,
    on_cpu=False,
    micro_batch=1,
    sequence_length=0,
    accumulation=1,
    half=True,
    weights_bytes=4,
    checkpointing=False,
    fused_loss=False,
    packed=True,
    attention="sdpa",
    optimizer="adamw",
    lora=None,
    zero=None,
)
WAYS: dict[str, dict[str, Any]] = {
    "autocast": {},
    "autocast, checkpointing, 4 rows": {"checkpointing": True, "micro_batch": 4},
    "autocast, fused loss, accumulation": {"fused_loss": True, "accumulation": 2},
    "half precision, flash attention": {"weights_bytes": 2, "attention": "flash_attention_2"},
    "half precision, checkpointing, fused loss, 4 rows": {
        "weights_bytes": 2,
        "checkpointing": True,
        "fused_loss": True,
        "micro_batch": 4,
    },
    "adapters, checkpointing": {"weights_bytes": 2, "lora": {"r": 16}, "checkpointing": True},
    "ZeRO-3, checkpointing, fused loss": {
        "weights_bytes": 2,
        "zero": Sharding(3),
        "checkpointing": True,
        "fused_loss": True,
    },
}
LEAST, MOST = 0.97, 1.05


def main() -> None:
    """Measure every cell, then write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    cells = [
        cell(model, length, way)
        for model in parser.parse_args().models
        for length in MODELS[model]
        for way in WAYS
    ]
    RESULTS.write_text(json.dumps(results_of(cells), indent=1) + "\n")


def cell(model: str, length: int, way: str) -> dict[str, Any]:
    """Bytes by the sum and by the dry run."""
    shape = plain(read_yaml(ROOT / "recipes" / "models" / f"{model}.yaml", Mistakes()))["config"]
    config, setup = config_from(shape), replace(PLAIN, sequence_length=length, **WAYS[way])
    formula = planned_bytes(config, setup)
    exact = dry_run(config, setup)
    print(
        f"{model}, {length} tokens, {way}: {formula / 2**30:.2f} GiB, {100 * (formula / exact - 1):+.1f} %",
        flush=True,
    )
    return {"model": model, "tokens": length, "way": way, "formula": formula, "dry_run": exact}


def results_of(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """As a benchmark writes them."""
    ratios = [found["formula"] / found["dry_run"] for found in cells]
    rows = [
        ("cells", ">= 24", len(cells), "", len(cells) >= 24),
        ("plan / dry run, largest", f"<= {MOST}", max(ratios), "ratio", max(ratios) <= MOST),
        ("plan / dry run, smallest", f">= {LEAST}", min(ratios), "ratio", min(ratios) >= LEAST),
        ("plan / dry run, median", None, median(ratios), "ratio", None),
    ]
    return {
        "device": f"{platform.machine()}, no GPU",
        "libraries": {name: metadata.version(name) for name in ("torch", "transformers", "peft")},
        "measurements": [
            dict(zip(("name", "target", "measured", "unit", "met"), row, strict=True))
            for row in rows
        ],
        "cells": cells,
    }


if __name__ == "__main__":
    main()
