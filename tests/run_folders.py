"""Folders as finished runs leave them, written in milliseconds; change one thing and compare."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from cpt.evaluation.paired import DocumentLosses, save_losses

RECIPE: dict[str, Any] = {
    "name": "first",
    "stage": "cpt",
    "seed": 1,
    "output_dir": "runs",
    "tags": ["demo"],
    "model": {"path": "base/final"},
    "data": {
        "sequence_length": 256,
        "sources": [
            {"path": "corpus/domain.jsonl", "name": "domain", "weight": 0.7},
            {"path": "corpus/general.jsonl", "name": "general", "weight": 0.3},
        ],
    },
    "budget": {"tokens": 20_480, "global_batch_tokens": 1024},
    "optimizer": {"learning_rate": 1e-3},
}
ENVIRONMENT: dict[str, Any] = {
    "started": "2026-01-01T10:00:00+00:00",
    "command": ["cpt/train.py", "recipe.yaml"],
    "folder": "home",
    "processes": 1,
    "python": "3.11.7",
    "platform": "Linux",
    "hardware": {
        "processor": "a processor",
        "cores": 4,
        "host_memory_gib": 16,
        "gpus": [],
        "driver": None,
    },
    "variables": {"OMP_NUM_THREADS": "2"},
    "versions": {"torch": "2.13.0", "transformers": "5.23.0", "peft": None},
    "code": "0123456789abcdef",
    "git": {"commit": "bad36a92eff5b5d0", "changes": "", "diff": ""},
}
INPUTS: dict[str, Any] = {
    "data": {
        "fingerprint": "f0",
        "tokens": 3000,
        "sources": {
            name: {
                "documents": 10,
                "held_out": 0,
                "tokens": 1500,
                "share": 0.5,
                "files": {f"/corpus/{name}.jsonl": f"{name}-hash"},
            }
            for name in ("domain", "general")
        },
    },
    "tokenizer": {"path": "base/final", "xxh3": "tokenizer-hash"},
    "weights": {
        "path": "base/final",
        "revision": None,
        "sha256": {"model.safetensors": "weights-hash"},
    },
}
STATUS: dict[str, Any] = {"state": "finished", "pid": 1, "step": 20, "steps": 20, "seconds": 12.5}


def copied(content: Any) -> Any:
    return json.loads(json.dumps(content))


def write_run(
    folder: Path,
    plant: Callable[..., None] = lambda **files: None,
    *,
    losses: list[float] | None = None,
) -> Path:
    """A run of 20 steps.

    Args:
        plant: changes recipe, environment, inputs, status in place.
    """
    folder.mkdir(parents=True)
    files = {
        "recipe": copied(RECIPE),
        "environment": copied(ENVIRONMENT),
        "inputs": copied(INPUTS),
        "status": copied(STATUS),
    }
    files["recipe"]["name"] = folder.name
    plant(**files)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(files["recipe"], sort_keys=False))
    for name in ("environment", "inputs", "status"):
        (folder / f"{name}.json").write_text(json.dumps(files[name]))
    losses = losses or [5 - 0.1 * step for step in range(1, 21)]
    lines = [
        {"step": step, "tokens": 1024 * step, "loss": loss, "tokens_per_second": 1000.0 + step}
        for step, loss in enumerate(losses, 1)
    ]
    evaluation = {
        "step": 20,
        "tokens": 20_480,
        "eval_domain_loss": 3.0,
        "eval_domain_bits_per_byte": 1.25,
    }
    write_lines(folder / "metrics.jsonl", [*lines, evaluation])
    return folder


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def keep_document_losses(
    folder: Path, *, shift: float = 0.0, documents: int = 40, first: int = 0
) -> None:
    """Of a set `domain` at the last step; `shift` nats a byte more than those of other runs."""
    draw = np.random.default_rng(0)
    num_bytes = draw.integers(100, 2000, documents)
    nats = num_bytes * (0.9 + 0.1 * draw.random(documents)) + shift * num_bytes
    hashes = np.arange(first, first + documents, dtype=np.uint64)
    save_losses(
        folder / "held_out" / "step-20.npz",
        {"domain": DocumentLosses(hashes, num_bytes, nats, num_bytes // 4, num_bytes // 8)},
    )
