"""Folders as long runs leave them, with all that a log line of a GPU run holds."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cpt.evaluation.kept_losses import DocumentLosses, save_losses

TOKENS_PER_STEP = 524_288
EVALUATED_EVERY = 2_000
DOCUMENTS = 400
SETS = SOURCES = ("code", "general")
FIGURES = {  # what a value is about
    "loss_smoothed": 2.3,
    "learning_rate": 3e-4,
    "grad_norm": 0.8,
    "epoch": 0.5,
    "tokens_per_second": 31_000.0,
    "data_wait": 0.0004,
    "mfu": 0.41,
    "step_seconds_p50": 16.9,
    "step_seconds_p95": 17.4,
    "gpu_memory_allocated_gib": 41.3,
    "gpu_memory_reserved_gib": 66.2,
    "gpu_memory_peak_gib": 64.8,
    "host_memory_gib": 23.5,
    "cpu_percent": 212.0,
    "gpu_temperature_celsius": 71.0,
    "gpu_power_watts": 655.0,
    "gpu_utilization_percent": 98.0,
    "seconds_to_go": 90_000.0,
    "cost": 410.0,
    "cost_to_go": 95.0,
    **{f"{figure}_{source}": value for source in SOURCES for figure, value in (("share", 0.5), ("loss", 2.2))},
}


def write_runs(folder: Path, number: int, steps: int) -> list[Path]:
    """Runs that differ in their seed and their learning rate."""
    folders = [folder / f"run-{place:02}" for place in range(number)]
    with ProcessPoolExecutor() as processes:
        return list(processes.map(write_run, folders, range(number), [steps] * number))


def write_run(folder: Path, seed: int, steps: int) -> Path:
    """One of them."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(folder.name, seed)))
    versions = dict.fromkeys(
        ("cpt", "torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "datasets"), "1.0"
    )
    environment = {
        "started": "2026-01-01T00:00:00+00:00",
        "processes": 8,
        "python": "3.12",
        "platform": "Linux",
        "versions": versions,
    }
    sources = {
        name: {
            "documents": 10**6,
            "held_out": 400,
            "tokens": 10**10,
            "files": {f"/data/{name}/{file}.jsonl": f"{file}" for file in range(40)},
        }
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
        name: DocumentLosses(hashes, num_bytes, num_bytes * draw.random(DOCUMENTS), num_bytes // 4, num_bytes // 8)
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
        "data": {"sequence_length": 4096, "sources": [{"path": f"data/{name}", "name": name} for name in SOURCES]},
        "budget": {"tokens": 10**10, "global_batch_tokens": TOKENS_PER_STEP},
        "optimizer": {"learning_rate": (1e-5, 2e-5, 3e-5)[seed % 3]},
    }


def lines(seed: int, steps: int) -> Iterator[dict[str, Any]]:
    """A log of each step, and the evaluations."""
    draw = random.Random(seed)
    for step in range(1, steps + 1):
        figures = {name: round(about * (0.9 + 0.2 * draw.random()), 6) for name, about in FIGURES.items()}
        yield {"step": step, "tokens": step * TOKENS_PER_STEP, "loss": 2 + draw.random(), **figures}
        if step % EVALUATED_EVERY == 0:
            evaluated = {
                f"eval_{name}_{figure}": draw.random()
                for name in SETS
                for figure in ("loss", "perplexity", "bits_per_byte")
            }
            yield {"step": step, "tokens": step * TOKENS_PER_STEP, **evaluated}
