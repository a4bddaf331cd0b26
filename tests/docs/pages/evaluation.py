"""A base, a run that went on from it, two more models, and held-out documents of several sentences."""

import json
import shutil
from pathlib import Path

from documented.tiny_runs import tiny_base, tiny_run
from guide_texts import manuals


def prepare(folder: Path) -> None:
    """What the first block names."""
    base = tiny_base(folder, "Qwen/Qwen3-0.6B-Base")
    going_on = ("model.path=Qwen/Qwen3-0.6B-Base", "evaluation.held_out_share=0.2")
    run = tiny_run(folder, "mine", *going_on, recipe="recipes/tiny/cpt.yaml")
    shutil.copytree(base, folder / "BASE")
    shutil.copytree(run / "final", folder / "MODEL")
    texts = [" ".join(passages)[:500] for passages in manuals(90).values()]
    for name, some in {"held_out": texts[:60], "prose": texts[60:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
