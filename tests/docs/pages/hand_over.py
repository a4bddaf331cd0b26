"""A run that is handed over."""

from pathlib import Path

from documented.tiny_runs import tiny_run

PORTS = [8000]


def prepare(folder: Path) -> None:
    """`runs/chemist`."""
    tiny_run(folder, "chemist")
