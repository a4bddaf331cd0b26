"""A finished run."""

from pathlib import Path

from documented.tiny_runs import tiny_run


def prepare(folder: Path) -> None:
    """`runs/mine`."""
    tiny_run(folder, "mine", "evaluation.held_out_share=0.1")
