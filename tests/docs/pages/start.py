"""What `make demo` leaves: a base, and the prose that it has read."""

from pathlib import Path

from guide_texts import write_base, write_general

PORTS = [7860]


def prepare(folder: Path) -> None:
    """`demo_runs/base/final` and `demo_runs/general`."""
    (folder / "demo_runs" / "base").mkdir(parents=True)
    write_base(folder / "demo_runs" / "base" / "final")
    write_general(folder / "demo_runs" / "general")
