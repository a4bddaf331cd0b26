"""What the processes of a run last said of themselves, for whoever watches them from outside; read without torch."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from cpt.runs.small_files import write_whole

FOLDER = "heartbeats"
Phase = Literal["starting", "training", "between", "ending"]


@dataclass(frozen=True)
class Sign:
    """What one process last said."""

    rank: int
    pid: int
    host: str
    phase: Phase
    """Starting: before the first step. Between: after a step that is followed by an evaluation or a save. Ending: after the last."""
    step: int
    beats: int
    """Counts on as long as there is progress; whoever watches needs no clock of this machine."""
    seconds_per_step: float | None
    """Median of the last 20 steps; None before three of them."""
    gpu_peak_gib: float | None = None
    """The most that torch held of its GPU since it began; None without one."""


def write_sign(folder: Path, sign: Sign) -> None:
    """Whole or not at all; a full disk must not end a run because of its pulse, nor make it look dead."""
    path = folder / FOLDER / f"rank-{sign.rank}.json"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(sign)))


def read_signs(folder: Path) -> list[Sign]:
    """What the processes of a run last said, by rank."""
    signs = []
    for path in sorted((folder / FOLDER).glob("rank-*.json")):
        try:
            signs.append(Sign(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):  # another version's, or gone meanwhile
            continue
    return sorted(signs, key=lambda sign: sign.rank)


def forget_signs(folder: Path) -> None:
    """Before processes are started anew."""
    for path in (folder / FOLDER).glob("*rank-*"):  # with what a killed process was writing
        path.unlink(missing_ok=True)
