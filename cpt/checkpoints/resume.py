"""Which checkpoint a run goes on from."""

import re
from pathlib import Path

PATTERN = re.compile(r"checkpoint-(\d+)")
LAST_WRITTEN = "trainer_state.json"  # the Trainer writes it after weights, optimizer and RNG states


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint-N of a run, or None where there is none."""
    return next(reversed(complete_checkpoints(folder)), None)


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoint-N of a run, oldest first."""
    complete = [path for path in folder.glob("checkpoint-*") if PATTERN.fullmatch(path.name) and (path / LAST_WRITTEN).exists()]
    return sorted(complete, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer step that the folder's name tells."""
    match = PATTERN.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])
