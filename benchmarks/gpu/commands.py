"""`python -m benchmarks.gpu.commands RESULTS`: whole runs with `cpt.train.train`, evaluation included.

- DeepSpeed's ZeRO-2 with and without `overlap_comm`: 20 steps of case A, whose losses must agree.
- The 24 GB recipe's model in the memory of a 24 GB card: evaluated before the first step and after the last one.

Appends a line to RESULTS for each run. `--dry-run` uses tiny shapes on a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import TrainerCallback

from benchmarks.gpu.__main__ import as_run, prepare_all
from benchmarks.gpu.cases import CASES
from benchmarks.gpu.page import read_lines
from benchmarks.gpu.processes import ROOT, Job, environment_of_a_run, last_line
from benchmarks.gpu.systems import Start
from benchmarks.gpu.watch import Watch, nvidia_smi
from cpt.recipe.load import load_recipe
from cpt.train import train

STEPS = {"A": 20, "H": 6}
RUNS = {"ZeRO-2": "A", "ZeRO-2, overlap_comm": "A", "24 GB recipe with evaluation": "H"}


def main() -> None:
    """Run what RESULTS does not have yet."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.commands", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--limit", type=float, default=240, help="seconds of one run")
    parser.add_argument("--train", type=Path, metavar="RECIPE", help=argparse.SUPPRESS)  # the process of one run
    options = parser.parse_args()
    if options.train:
        train_and_report(options.train, options.results)
        return
    known = {line["name"] for line in read_lines(options.results) if line.get("step") == "command" and "failed" not in line}
    with tempfile.TemporaryDirectory() as temporary:
        for name, case in RUNS.items():
            if name in known:
                continue
            prepare_all([Job(case, "cpt", is_dry=options.dry_run)], Path(temporary), options.limit)
            line = {"step": "command", "name": name, "dry_run": options.dry_run}
            line |= run(name, case, Path(temporary), options.limit, is_dry=options.dry_run)
            with options.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(name, line.get("failed") or line["losses"], flush=True)


def run(name: str, case: str, folder: Path, limit: float, *, is_dry: bool) -> dict[str, Any]:
    """Losses, memory and time of one run in a process of its own."""
    recipe, report, log = folder / f"{name}.yaml", folder / f"{name}.json", folder / f"{name}.log"
    recipe.write_text(yaml.safe_dump(sections_of(name, case, folder, is_dry=is_dry)))
    words = [sys.executable, "-m", "benchmarks.gpu.commands", str(report), "--train", str(recipe)]
    began = time.monotonic()
    with log.open("w") as file:
        try:
            subprocess.run(words, cwd=ROOT, env=environment_of_a_run(), stdout=file, stderr=file, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"failed": f"took longer than {limit:.0f} seconds"}
    if not report.exists():
        return {"failed": last_line(log)}
    metrics = [json.loads(line) for line in (folder / case / "runs" / slug(name) / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in metrics if "loss" in line]
    return {"losses": losses, "seconds": time.monotonic() - began, **json.loads(report.read_text())}


def slug(name: str) -> str:
    """The name of the run's folder."""
    return "-".join(name.lower().replace(",", "").split())


def sections_of(name: str, case: str, folder: Path, *, is_dry: bool) -> dict[str, Any]:
    """The recipe of a run."""
    what = as_run(CASES[case], Job(case, "cpt", is_dry=is_dry))
    start = Start(what, folder / case, Watch(on_gpu=not is_dry, timed=1), backend="aot_eager" if is_dry else "inductor")
    sections: dict[str, Any] = start.recipe.model_dump(mode="json", exclude_unset=True)
    rows = 8 if case == "A" and not is_dry else what.rows
    sections["name"] = slug(name)
    sections["budget"] = {"tokens": STEPS[case] * rows * what.tokens}
    sections["training"] |= {"per_device_train_batch_size": rows, "logging_steps": 1}
    if case == "H":
        sections["evaluation"] = {"held_out_share": 0.02}
        return sections
    profile = json.loads((ROOT / "deepspeed_configs" / "ds_config_zero1.json").read_text())
    profile["zero_optimization"] |= {"stage": 2, "overlap_comm": "overlap" in name}
    (folder / f"{name}.deepspeed.json").write_text(json.dumps(profile))
    sections["model"].pop("dtype")
    sections["training"].pop("torch_compile_backend")
    sections["training"] |= {"bf16": True, "deepspeed": str(folder / f"{name}.deepspeed.json")}
    return sections


class ReportAfterEvaluation(TrainerCallback):
    """Ends the process after the last step, and its evaluation where there is one: saving 8B parameters is not measured here."""

    def __init__(self, report: Path) -> None:
        self.report, self.evaluations = report, 0

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count evaluations; the last one ends the run."""
        self.evaluations += 1
        if state.global_step >= state.max_steps:
            self.finish()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A run without evaluation ends here."""
        self.finish()

    def finish(self) -> None:
        """Write the report, and leave without saving."""
        found: dict[str, Any] = {"evaluations": self.evaluations}
        if torch.cuda.is_available():
            found |= {"peak_allocated": torch.cuda.max_memory_allocated(), "peak_reserved": torch.cuda.max_memory_reserved()}
            found["nvidia_smi"] = nvidia_smi("memory.used,memory.total")
        self.report.write_text(json.dumps(found))
        os._exit(0)


def train_and_report(path: Path, report: Path) -> None:
    """Train a recipe in the memory of its case."""
    recipe = load_recipe(path)
    gib = CASES[recipe.output_dir.parent.name].gib
    if gib is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / torch.cuda.get_device_properties(0).total_memory))

    def prepare(trainer: Any) -> None:
        trainer._save_checkpoint = lambda *_: None
        trainer.add_callback(ReportAfterEvaluation(report))

    train(recipe, ready=prepare)


if __name__ == "__main__":
    main()
