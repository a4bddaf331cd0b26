"""What `cpt launch` knows of a start, made in memory, and scripts that stand for programs of a cluster."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

from cpt.launchers.launch import Launch
from cpt.recipe.load import load_recipe

RECIPE = """
name: tiny
model: {path: none}
data: {sequence_length: 64, sources: [{path: documents.jsonl}]}
budget: {tokens: 65536, global_batch_tokens: 4096}
training: {per_device_train_batch_size: 2}
"""


def launch_of(
    work: Path, *, overrides: tuple[str, ...] = (), nodes: int = 1, engine: str = "torchrun", **changes
) -> Launch:
    """A launch of a small recipe, with its files in `work/launch/x`."""
    file = work / "recipe.yaml"
    file.write_text(RECIPE)
    launch = Launch(
        recipe=load_recipe(file, overrides),
        file=Path("recipe.yaml"),
        overrides=overrides,
        lora=False,
        engine=engine,
        nodes=nodes,
        gpus_per_node=2,
        hosts=tuple(f"node-{number}" for number in range(nodes)) if nodes > 1 and engine != "slurm" else (),
        port=29500,
        folder=work / "launch" / "x",
        venv=work / "venv",
        work=work,
    )
    return replace(launch, **changes)


def write_programs(folder: Path, **bodies: str) -> Path:
    """Bash scripts of these names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    return folder


def write_all(launch: Launch, files: dict[str, str]) -> None:
    """The files of a launch, each shell script among them free of mistakes of grammar."""
    launch.folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (launch.folder / name).write_text(content)
        if name.endswith((".sh", ".sbatch")):
            checked = subprocess.run(["bash", "-n", str(launch.folder / name)], capture_output=True, text=True)
            assert checked.returncode == 0, checked.stderr


def environment_with(programs: Path, **more: str) -> dict[str, str]:
    """These programs before all others."""
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **more}
