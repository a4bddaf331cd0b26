"""A small run folder with everything that a run can have."""

import json
import math

import pytest
import yaml

RECIPE = {
    "name": "code",
    "stage": "cpt",
    "seed": 1,
    "model": {"path": "base/final"},
    "data": {
        "sequence_length": 8,
        "sources": [{"path": "code.jsonl", "name": "code", "weight": 3}, {"path": "prose.jsonl", "name": "prose"}],
    },
    "budget": {"tokens": 1600, "global_batch_tokens": 16},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3},
    "evaluation": {"retain": {"prose": None}, "held_out_share": 0.1, "prompts": ["def "]},
    "training": {"per_device_train_batch_size": 2},
}
ENVIRONMENT = {
    "started": "2026-01-02T03:04:05+00:00",
    "command": ["/home/me/cpt/__main__.py", "train", "recipes/code recipe.yaml"],
    "processes": 1,
    "python": "3.11.7",
    "platform": "Linux",
    "hardware": {
        "processor": "a processor",
        "cores": 4,
        "host_memory_gib": 24,
        "gpus": ["NVIDIA H100", "NVIDIA H100"],
        "driver": "1",
    },
    "variables": {"OMP_NUM_THREADS": "1"},
    "versions": {"cpt": "0.1.0", "torch": "2.13.0", "peft": None},
    "git": {"commit": "0123456789abcdef", "changes": " M cpt/train.py\n", "diff": "-old\n+new\n"},
}
VERDICT = {"headline": "It worked: 10 % fewer bits per byte."}
CODE = {
    "documents": 90,
    "held_out": 10,
    "tokens": 600,
    "share": 0.75,
    "dropped": {"short": 3},
    "files": {"c.jsonl": "ab"},
}
PROSE = {"documents": 40, "held_out": 10, "tokens": 400, "share": 0.25, "dropped": {}, "files": {}}
INPUTS = {
    "data": {"sources": {"code": CODE, "prose": PROSE}},
    "tokenizer": {"path": "base/final", "xxh3": "cd"},
    "weights": {"sha256": {"model.safetensors": "ef"}},
}
PLAN = {
    "gpu": "NVIDIA H100",
    "gpus": 2,
    "moment": "the update",
    "gpu_memory_gib": {"weights": 2.0, "optimizer": 4.0, "activations": 1.0},
    "gpu_total_gib": 7.0,
    "host_total_gib": 3.0,
    "tokens_per_second": 200.0,
    "assumed_mfu": 0.4,
}
EVENTS = [
    {"time": "2026-01-02T03:05:00.123+00:00", "kind": "nan_skipped", "step": 40, "message": "Step 40 was skipped."},
    {"time": "2026-01-02T03:06:00.123+00:00", "kind": "restart", "step": None, "message": "Starting again."},
]


def log_line(step):
    """What a step logs."""
    figures = {"loss": 5 - math.log(1 + step), "learning_rate": 1e-3, "grad_norm": 1.0, "cost": 0.01 * step}
    speed = {"tokens_per_second": 100.0, "mfu": 0.4, "step_seconds_p50": 0.16, "step_seconds_p95": 0.2}
    memory = {"gpu_memory_peak_gib": 6.5, "gpu_memory_reserved_gib": 7.0, "host_memory_gib": 3.5}
    sources = {"share_code": 0.74, "share_prose": 0.26, "loss_code": 4.0, "loss_prose": 4.5}
    return {"step": step, "tokens": 16 * step, **figures, **speed, **memory, **sources}


def evaluation_line(step, code, prose):
    """What an evaluation logs."""
    bits = {"eval_code_bits_per_byte": code, "eval_prose_bits_per_byte": prose}
    return {"step": step, "tokens": 16 * step, "eval_code_loss": 3 * code, **bits}


METRICS = [
    evaluation_line(0, 2.0, 2.0),
    *(log_line(step) for step in range(2, 52, 2)),
    evaluation_line(50, 1.9, 2.2),
    *(log_line(step) for step in range(52, 102, 2)),
    evaluation_line(100, 1.8, 2.1),
]


@pytest.fixture
def run_folder(tmp_path):
    """All files of the run."""
    folder = tmp_path / "code"
    (folder / "final").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    status = {"state": "finished", "updated": "2026-01-02T03:10:05+00:00", "step": 100, "steps": 100, "seconds": 61.0}
    parts = {"environment": ENVIRONMENT, "inputs": INPUTS, "plan": PLAN, "status": status, "verdict": VERDICT}
    for name, content in parts.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    for name, lines in {"metrics": METRICS, "events": EVENTS}.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder
