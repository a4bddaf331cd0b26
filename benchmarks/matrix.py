"""`python -m benchmarks.matrix`: losses of sixteen tiny recipes, plain, with 2 processes, ZeRO-2 and ZeRO-3, to the
last digit. 25 minutes on 2 cores.

A change that should not change results is compared with the version before it: run this in both, then `--against` the
other's file. What is measured already is not measured again; delete the file to begin anew.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cpt.recipe.load import dump_recipe, load_recipe

ROOT = Path(__file__).parents[1]
TINY = ROOT / "recipes/tiny"
STEPS = 3
GATHERS = "stage3_gather_16bit_weights_on_model_save"
MODELS = {  # keys that name an earlier run, and how they do: here all name the tiny model that is trained first
    "model.path": "model: {path: runs/",
    "training.teacher_model_name_or_path": "teacher_model_name_or_path: runs/",
}
ENGINES: dict[str, tuple[int, dict[str, Any]]] = {  # processes, and what is added to `training:`
    "plain": (1, {}),
    "two": (2, {}),
    "zero2": (2, {"deepspeed": {"zero_optimization": {"stage": 2}}}),
    "zero3": (2, {"deepspeed": {"zero_optimization": {"stage": 3, GATHERS: True}}}),
}
FILLED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matrix", description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument(
        "--recipes", nargs="+", default=sorted(path.stem for path in TINY.glob("*.yaml"))
    )
    parser.add_argument("--write", type=Path, default=ROOT / "build/matrix/losses.json")
    parser.add_argument("--against", type=Path, help="Compare with this file, and do not measure.")
    parser.add_argument("-j", type=int, default=1, help="Cells at the same time.")
    asked = parser.parse_args()
    asked.write.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = json.loads(asked.write.read_text()) if asked.write.exists() else {}
    if asked.against is not None:
        sys.exit(compare(found, json.loads(asked.against.read_text())))
    base = asked.write.parent / "base"
    if not (base / "final").is_dir():
        subprocess.run(
            [sys.executable, "-m", "cpt", "train", write(base, "pretrain", {})],
            check=True,
            cwd=ROOT,
        )
    cells = [f"{recipe} {engine}" for recipe in asked.recipes for engine in asked.engines]
    with ThreadPoolExecutor(asked.j) as pool:
        left = [cell for cell in cells if cell not in found]
        measured = pool.map(lambda cell: measure(asked.write.parent, base, *cell.split()), left)
        for cell, losses in zip(left, measured, strict=True):
            found[cell] = losses
            asked.write.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{cell}: {losses}", flush=True)


def write(folder: Path, recipe: str, training: dict[str, Any], **changes: Any) -> Path:
    """The recipe of a cell, whose run is in this folder."""
    given = {
        "output_dir": folder.parent,
        "name": folder.name,
        "training.logging_steps": 1,
        **changes,
    }
    given |= {f"training.{key}": json.dumps(value) for key, value in training.items()}
    resolved = load_recipe(
        TINY / f"{recipe}.yaml", [f"{key}={value}" for key, value in given.items()]
    )
    path = folder.parent / f"{folder.name}.yaml"
    path.write_text(dump_recipe(resolved))
    return path


def measure(folder: Path, base: Path, recipe: str, engine: str) -> list[dict[str, str]] | str:
    """Loss and gradient norm of the first steps, as written; or the line that refuses the cell."""
    processes, training = ENGINES[engine]
    if "deepspeed" in training:
        training = {"deepspeed": {**training["deepspeed"], **dict.fromkeys(FILLED, "auto")}}
    plain = (TINY / f"{recipe}.yaml").read_text()
    named = {key: str(base) for key, words in MODELS.items() if words in plain}
    run = folder / f"{recipe}-{engine}"
    path = write(run, recipe, training, **named)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    words = [
        *(launcher if processes > 1 else []),
        "-m",
        "cpt.commands.reproduce",
        str(path),
        "--steps",
        str(STEPS),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CPT_CACHE": str(folder / "cache"),
    }
    ended = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    metrics = run / "metrics.jsonl"
    if not metrics.exists():
        lines = [line for line in ended.stderr.splitlines() if "Error: " in line]
        return next(iter(lines), ended.stderr[-300:]).replace(str(folder), "")
    logged = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [
        {name: repr(line[name]) for name in ("loss", "grad_norm") if name in line}
        for line in logged
        if "loss" in line
    ]


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> int:
    """Print the cells that differ; 1 if any does."""
    differing = [
        cell for cell in sorted(ours.keys() | theirs.keys()) if ours.get(cell) != theirs.get(cell)
    ]
    for cell in differing:
        print(f"{cell}:\n  {ours.get(cell)}\n  {theirs.get(cell)}")
    print(f"{len(ours)} cells, {len(differing)} differ")
    return int(bool(differing))


if __name__ == "__main__":
    main()
