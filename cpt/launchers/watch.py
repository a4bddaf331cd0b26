"""Whether a run that was started still makes progress, seen from outside by its signs of life."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from cpt.runs.record import Run
from cpt.runs.signs import Sign, read_signs

LEAST_PATIENCE = 30.0  # seconds without progress in a step
STEPS_OF_PATIENCE = 5  # median steps
# Seconds without a sign: before the first and after the last step any work is one, in an evaluation each batch, in a save nothing.
PATIENCE = {"starting": 3600.0, "first steps": 600.0, "between": 1800.0, "ending": 3600.0}


def patience(sign: Sign) -> float:
    """Seconds without progress after which a process counts as hung."""
    if sign.phase != "training":
        return PATIENCE[sign.phase]
    if sign.seconds_per_step is None:
        return PATIENCE["first steps"]
    return max(LEAST_PATIENCE, STEPS_OF_PATIENCE * sign.seconds_per_step)


@dataclass
class Watch:
    """Sees which process made no progress for too long, by this machine's clock."""

    folder: Path
    beats: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)
    """(rank, pid) -> the last count, and when it was seen first."""

    def hung(self, now: float) -> Sign | None:
        """The process that was silent for longest past its patience, if any.

        Of processes that start or end one may work while the others wait for it, so there the last sign of any of them counts. On a disk
        that is read-only nobody can give a sign, and after the run is finished nobody has to: then its verdict is being made.
        """
        if not os.access(self.folder, os.W_OK):
            self.beats.clear()
            return None
        signs = read_signs(self.folder)
        for sign in signs:
            if self.beats.get((sign.rank, sign.pid), (-1, now))[0] != sign.beats:
                self.beats[sign.rank, sign.pid] = (sign.beats, now)
        seen = {sign: self.beats[sign.rank, sign.pid][1] for sign in signs}
        last = max(seen.values(), default=now)
        silent = {sign: now - (last if sign.phase in ("starting", "ending") else seen[sign]) for sign in signs}
        late = [sign for sign in signs if silent[sign] > patience(sign)]
        return max(late, key=lambda sign: silent[sign]) if late and Run(self.folder).status().get("state") != "finished" else None
