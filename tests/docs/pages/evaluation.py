"""A base, a run that went on from it, two more models, and held-out texts."""

import shutil
from pathlib import Path

from documented.tiny_runs import tiny_base, tiny_run, tiny_texts


def prepare(folder: Path) -> None:
    """What the first block names."""
    base = tiny_base(folder, "Qwen/Qwen3-0.6B-Base")
    going_on = ("model.path=Qwen/Qwen3-0.6B-Base", "evaluation.held_out_share=0.2")
    run = tiny_run(folder, "mine", *going_on, recipe="recipes/tiny/cpt.yaml")
    shutil.copytree(base, folder / "BASE")
    shutil.copytree(run / "final", folder / "MODEL")
    tiny_texts(folder / "held_out.jsonl")
    tiny_texts(folder / "prose.jsonl")
