"""Three finished runs, of which one learned more slowly and one read another order."""

from pathlib import Path

from documented.tiny_runs import tiny_run

SUITE = "long"


def prepare(folder: Path) -> None:
    """`runs/first`, `second`, `third`."""
    tiny_run(folder, "first")
    tiny_run(folder, "second", "optimizer.learning_rate=1e-3")
    tiny_run(folder, "third", "seed=2")
