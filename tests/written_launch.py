"""Files of `cpt launch`, written and edited for hosts on this machine, and what their runs leave behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny import write_recipe

STEPS = 40


def work_folder(recipe: dict, folder: Path, **changes: dict) -> Path:
    """A folder with `recipe.yaml`, a run of so many steps on the CPU that it can be told to stop in the middle."""
    recipe = {**recipe, "output_dir": "runs", "budget": {"tokens": STEPS * 512, "global_batch_tokens": 512}, **changes}
    recipe["training"] = {**recipe["training"], "use_cpu": True}
    write_recipe(recipe, folder / "recipe.yaml")
    return folder


def write_launch(work: Path, name: str, *words: str) -> Path:
    """The files that start a run of this name, in their folder."""
    typed = [
        sys.executable,
        "-m",
        "cpt",
        "launch",
        "recipe.yaml",
        f"name={name}",
        "--output",
        f"launch/{name}",
        *words,
    ]
    done = subprocess.run(typed, cwd=work, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", Path("~/.cache/torch_extensions").expanduser())
    own = {"OMP_NUM_THREADS": 1, "CPT_CACHE": work / "cache", "TORCH_EXTENSIONS_DIR": extensions}
    script = work / "launch" / name / "environment.sh"
    first, rest = script.read_text().split("\n", 1)
    script.write_text("\n".join([first, *(f"export {key}={value}" for key, value in own.items()), rest]))
    return script.parent


def losses(work: Path, name: str) -> dict[int, float]:
    """Step -> loss."""
    metrics = work / "runs" / name / "metrics.jsonl"
    lines = (
        [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
        if metrics.exists()
        else []
    )
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def status(work: Path, name: str) -> dict:
    """What the run says of itself."""
    return json.loads((work / "runs" / name / "status.json").read_text())
