"""`python -m benchmarks.guards.alarms`: how often the loss guard skips steps of healthy runs: two hours on one core.

The runs train small models of several families from scratch on the standard library's code and prose, each with a
shape, learning rate, batch and seed drawn at random. The guard's constants were fixed before any of them was made. A
run in which nothing is injected has no step that should be skipped, so each skipped step counts as a false alarm.
Writes benchmarks/results/guards_alarms.json.
"""

import argparse
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.library_corpus import build_corpus
from cpt.tokenizer.train_bpe import train_bpe

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "guards_alarms.json"
SEQUENCE, VOCABULARY = 128, 2048
FAMILIES = ("llama", "gpt2", "qwen3", "gpt_neox")
TARGET = 1e-3  # of the steps


def main() -> None:
    """Make the runs one after the other, and write what was skipped in them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guards.alarms", description=__doc__)
    parser.add_argument("--runs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1500, help="of each run")
    parser.add_argument("--seed", type=int, default=20_000, help="what the runs are drawn with")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        corpus = build_corpus(work)
        texts = [
            json.loads(line)["text"]
            for kind in ("domain", "general")
            for line in corpus.files[kind, "train"].open()
        ]
        train_bpe(texts, VOCABULARY, work / "tokenizer")
        made: list[dict[str, Any]] = []
        for number in range(asked.runs):
            made.append(
                train(work, f"run{number}", asked.steps, random.Random(asked.seed + number))
            )
            print(made[-1], flush=True)
            RESULTS.write_text(json.dumps(results_of(made), indent=1) + "\n")


def train(work: Path, name: str, steps: int, draw: random.Random) -> dict[str, Any]:
    family, width, layers = (
        draw.choice(FAMILIES),
        draw.choice((64, 96, 128)),
        draw.choice((2, 3, 4)),
    )
    rows, rate = draw.choice((4, 8)), 10 ** draw.uniform(-3.3, -2.3)
    kinds, seed = (
        draw.choice((["domain"], ["general"], ["domain", "general"])),
        draw.randrange(10**6),
    )
    recipe = {
        "name": name,
        "stage": "pretrain",
        "seed": seed,
        "output_dir": str(work / "runs"),
        "model": {"from_scratch": True, "config": shape(family, width, layers)},
        "tokenizer": {"path": str(work / "tokenizer")},
        "data": {
            "sequence_length": SEQUENCE,
            "sources": [{"path": str(work / kind / "train.jsonl"), "name": kind} for kind in kinds],
        },
        "budget": {"tokens": steps * rows * SEQUENCE, "global_batch_tokens": rows * SEQUENCE},
        "optimizer": {"learning_rate": rate},
        "schedule": {
            "name": "cosine",
            "warmup_tokens": steps * rows * SEQUENCE // 20,
            "floor": 0.1,
        },
        "training": {
            "per_device_train_batch_size": rows,
            "logging_steps": steps // 10,
            "use_cpu": True,
        },
        "checkpoints": {"every_steps": steps},
    }
    path = work / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run(
        [sys.executable, "cpt/train.py", str(path)],
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    about = {
        "family": family,
        "width": width,
        "layers": layers,
        "rows": rows,
        "learning_rate": float(f"{rate:.2g}"),
        "seed": seed,
    }
    return {**about, "texts": "+".join(kinds), "steps": steps, **alarms(work / "runs" / name)}


def shape(family: str, width: int, layers: int) -> dict[str, Any]:
    common = {"model_type": family, "vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE}
    if family == "gpt2":
        return {
            "model_type": family,
            "vocab_size": VOCABULARY,
            "n_positions": SEQUENCE,
            "n_embd": width,
            "n_layer": layers,
            "n_head": 4,
        }
    shared = {
        **common,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 3 * width,
    }
    return (
        shared
        if family == "gpt_neox"
        else {**shared, "num_key_value_heads": 2, "head_dim": width // 4}
    )


def alarms(folder: Path) -> dict[str, Any]:
    """What was skipped, and how the run ended."""
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    skipped = [event for event in events if event["kind"] in ("spike_skipped", "nan_skipped")]
    rolled_back = sum(event["kind"] == "rolled_back" for event in events)
    loss = [
        line["loss"]
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        if "loss" in line
    ][-1]
    return {
        "skipped": len(skipped),
        "rolled_back": rolled_back,
        "last_loss": loss,
        "said": [event["message"] for event in skipped],
    }


def results_of(made: list[dict[str, Any]]) -> dict[str, Any]:
    steps, skipped = sum(one["steps"] for one in made), sum(one["skipped"] for one in made)
    runs, most = sum(one["skipped"] > 0 for one in made), upper_limit(skipped) / steps
    share = {
        "target": f"<= {TARGET:g}",
        "measured": skipped / steps,
        "unit": "share of the steps",
        "met": skipped / steps <= TARGET,
    }
    rolled_back = sum(one["rolled_back"] for one in made)
    measurements = [
        {
            "name": f"false alarms of the loss guard: {skipped} in {steps} steps of {len(made)} runs",
            **share,
        },
        {
            "name": "their rate is below this with 95 % confidence",
            "target": None,
            "measured": most,
            "unit": "share of the steps",
            "met": None,
        },
        {
            "name": "runs with a false alarm",
            "target": None,
            "measured": runs,
            "unit": f"of {len(made)}",
            "met": None,
        },
        {
            "name": "runs that went back for it",
            "target": "0",
            "measured": rolled_back,
            "unit": "",
            "met": rolled_back == 0,
        },
    ]
    return {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "measurements": measurements,
        "runs": made,
    }


def upper_limit(count: int) -> float:
    """The mean of a Poisson distribution in which so few have a chance of 5 %."""
    low, high = 0.0, 3.0 * count + 10.0
    for _ in range(60):
        mean = (low + high) / 2
        chance = sum(
            math.exp(-mean) * mean**number / math.factorial(number) for number in range(count + 1)
        )
        low, high = (mean, high) if chance > 0.05 else (low, mean)
    return low


if __name__ == "__main__":
    main()
