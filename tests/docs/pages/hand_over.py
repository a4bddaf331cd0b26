"""A run that went on from a base, what instructions made of that base, and an adapter."""

import shutil
from pathlib import Path

from documented.tiny_runs import tiny_base, tiny_run

PORTS = [8000]


def prepare(folder: Path) -> None:
    """`runs/chemist`, `BASE`, `BASE-Instruct`, `ADAPTER`."""
    tiny_base(folder, "BASE")
    going_on = {"recipe": "recipes/tiny/cpt.yaml"}
    tiny_run(folder, "chemist", "model.path=BASE", **going_on)
    shutil.copytree(tiny_run(folder, "chat", "model.path=BASE", "seed=2", **going_on) / "final", folder / "BASE-Instruct")
    adapted = tiny_run(folder, "adapted", "model.path=BASE", "model.lora.r=4", **going_on)
    shutil.copytree(adapted / "final" / "adapter", folder / "ADAPTER")
