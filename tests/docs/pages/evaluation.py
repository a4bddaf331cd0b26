"""A base, and a run that went on from it."""

from pathlib import Path

from documented.tiny_runs import tiny_base, tiny_run


def prepare(folder: Path) -> None:
    """What the first block names."""
    tiny_base(folder, "Qwen/Qwen3-0.6B-Base")
    going_on = ("model.path=Qwen/Qwen3-0.6B-Base", "evaluation.held_out_share=0.2")
    tiny_run(folder, "mine", *going_on, recipe="recipes/tiny/cpt.yaml")
