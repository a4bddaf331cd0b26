"""Folders as long runs leave them, with all that a log line of a GPU run holds."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cpt.evaluation.paired import DocumentLosses, save_losses

TOKENS_PER_STEP = 524_288
EVALUATED_EVERY = 2_000
DOCUMENTS = 400
SETS = SOURCES = ("code", "general")
FIGURES = (
    *(
        "loss_smoothed",
        "learning_rate",
        "grad_norm",
        "epoch",
        "tokens_per_second",
        "data_wait",
        "mfu",
    ),
    *(
        "step_seconds_p50",
        "step_seconds_p95",
        "gpu_memory_allocated_gib",
        "gpu_memory_reserved_gib",
    ),
    *("gpu_memory_peak_gib", "host_memory_gib", "cpu_percent"),
    *(
        "gpu_temperature_celsius",
        "gpu_power_watts",
        "gpu_utilization_percent",
        "seconds_to_go",
        "cost",
        "cost_to_go",
    ),
    *(f"{figure}_{source}" for source in SOURCES for figure in ("share", "loss")),
)


def write_runs(folder: Path, number: int, steps: int) -> list[Path]:
    """Runs that differ in their seed and their learning rate."""
    folders = [folder / f"run-{place:02}" for place in range(number)]
    with ProcessPoolExecutor() as processes:
        return list(processes.map(write_run, folders, range(number), [steps] * number))


def write_run(folder: Path, seed: int, steps: int) -> Path:
    """One of them."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(folder.name, seed)))
    packages = (
        "cpt",
        "torch",
        "transformers",
        "accelerate",
        "deepspeed",
        "peft",
        "trl",
        "datasets",
    )
    environment = {
        "processes": 8,
        "python": "3.12",
        "platform": "Linux",
        "versions": dict.fromkeys(packages, "1.0"),
    }
    counts = {"documents": 10**6, "held_out": 400, "tokens": 10**10}
    sources = {
        name: {**counts, "files": {f"/data/{name}/{file}.jsonl": str(file) for file in range(40)}}
        for name in SOURCES
    }
    inputs = {
        "data": {"fingerprint": "f", "sources": sources},
        "tokenizer": {"xxh3": "t"},
        "weights": {"sha256": {"model.safetensors": "w"}},
    }
    status = {"state": "finished", "step": steps, "steps": steps, "seconds": 10.0 * steps}
    for name, content in {"environment": environment, "inputs": inputs, "status": status}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines(seed, steps))
    draw = np.random.default_rng(seed)
    num_bytes = np.arange(1000, 1000 + DOCUMENTS)
    hashes = np.arange(DOCUMENTS, dtype=np.uint64)
    losses = {
        name: DocumentLosses(
            hashes, num_bytes, num_bytes * draw.random(DOCUMENTS), num_bytes // 4, num_bytes // 8
        )
        for name in SETS
    }
    save_losses(folder / "held_out" / f"step-{steps}.npz", losses)
    return folder


def recipe(name: str, seed: int) -> dict[str, Any]:
    """In short; what is left out has its default."""
    return {
        "name": name,
        "stage": "cpt",
        "seed": seed,
        "model": {"path": "base"},
        "data": {
            "sequence_length": 4096,
            "sources": [{"path": f"data/{name}", "name": name} for name in SOURCES],
        },
        "budget": {"tokens": 10**10, "global_batch_tokens": TOKENS_PER_STEP},
        "optimizer": {"learning_rate": (1e-5, 2e-5, 3e-5)[seed % 3]},
    }


def lines(seed: int, steps: int) -> Iterator[dict[str, Any]]:
    """A log of each step, and the evaluations."""
    draw = random.Random(seed)
    for step in range(1, steps + 1):
        figures = {name: round(100 * draw.random(), 6) for name in FIGURES}
        yield {"step": step, "tokens": step * TOKENS_PER_STEP, "loss": 2 + draw.random(), **figures}
        if step % EVALUATED_EVERY == 0:
            evaluated = {
                f"eval_{name}_{figure}": draw.random()
                for name in SETS
                for figure in ("loss", "perplexity", "bits_per_byte")
            }
            yield {"step": step, "tokens": step * TOKENS_PER_STEP, **evaluated}
